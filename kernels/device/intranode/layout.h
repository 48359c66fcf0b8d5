// get_dispatch_layout: for every token the ranks that need it, and the counts that follow from
// that. Purely local; a duplicate expert of one token is counted once per appearance.
#ifndef KERNELS_DEVICE_INTRANODE_LAYOUT_H_
#define KERNELS_DEVICE_INTRANODE_LAYOUT_H_

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/experts.h"
#include "kernels/device/operation.h"

namespace deepep {

// Where blocks meet. All of it is zero between two layouts, so nobody has to clear it, or the
// results, before one.
struct LayoutScratch {
  uint32_t* arrivals = nullptr;  // blocks that have added their counts
  int32_t* ranks = nullptr;
  int32_t* experts = nullptr;

  DEEPEP_DEVICE LayoutScratch(const DeepEpLayoutArgs& args, int num_ranks) {
    if (args.scratch == nullptr) return;
    arrivals = reinterpret_cast<uint32_t*>(args.scratch);
    ranks = args.scratch + 1;
    experts = ranks + num_ranks;
  }
};

template <int kNumRanks>
DEEPEP_DEVICE void count_layout(const DeepEpLayoutArgs& args) {
  const int num_ranks = known_or<kNumRanks>(args.num_ranks);
  const ExpertSplit split(args.num_experts, num_ranks);
  const auto grid = arch::this_grid();
  constexpr int kSharedExperts = 2048;  // larger models count in global memory at once
  DEEPEP_SHARED int32_t rank_counts[DEEPEP_MAX_RANKS];
  DEEPEP_SHARED int32_t expert_counts[kSharedExperts];
  const LayoutScratch scratch(args, num_ranks);
  arch::Histogram per_rank(args.num_tokens_per_rank, scratch.ranks, num_ranks, rank_counts,
                           DEEPEP_MAX_RANKS);
  arch::Histogram per_expert(args.num_tokens_per_expert, scratch.experts, args.num_experts,
                             expert_counts, kSharedExperts);
  for (int64_t token = grid.thread(); token < args.num_tokens; token += grid.num_threads()) {
    uint64_t ranks = 0;  // bit r: some expert of this token lives on rank r
    for (int k = 0; k < args.num_topk; ++k) {
      const int64_t id = load_id(args.topk_idx, args.idx_bytes, token * args.num_topk + k);
      if (id < 0 || id >= args.num_experts) continue;
      per_expert.add(static_cast<int>(id));
      ranks |= uint64_t{1} << split.owner(static_cast<int>(id));
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
      const bool needed = (ranks >> rank) & 1;
      args.is_token_in_rank[token * num_ranks + rank] = needed;
      if (needed) per_rank.add(rank);
    }
  }
  per_rank.flush();
  per_expert.flush();
  if (!grid.is_last_block(scratch.arrivals)) return;
  per_rank.finish();
  per_expert.finish();
  if (scratch.arrivals != nullptr && arch::this_block().lane() == 0) *scratch.arrivals = 0;
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTRANODE_LAYOUT_H_

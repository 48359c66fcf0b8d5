// get_dispatch_layout: for every token the ranks that need it, and the counts that follow from
// that. Purely local; a duplicate expert of one token is counted once per appearance.
#ifndef KERNELS_DEVICE_INTRANODE_LAYOUT_H_
#define KERNELS_DEVICE_INTRANODE_LAYOUT_H_

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/experts.h"
#include "kernels/device/operation.h"

namespace deepep {

template <int kNumRanks>
DEEPEP_DEVICE void count_layout(const DeepEpLayoutArgs& args) {
  const int num_ranks = known_or<kNumRanks>(args.num_ranks);
  const ExpertSplit split(args.num_experts, num_ranks);
  const auto grid = arch::this_grid();
  constexpr int kSharedExperts = 2048;  // larger models count in global memory at once
  DEEPEP_SHARED int32_t rank_counts[DEEPEP_MAX_RANKS];
  DEEPEP_SHARED int32_t expert_counts[kSharedExperts];
  arch::Histogram per_rank(args.num_tokens_per_rank, num_ranks, rank_counts, DEEPEP_MAX_RANKS);
  arch::Histogram per_expert(args.num_tokens_per_expert, args.num_experts, expert_counts,
                             kSharedExperts);
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
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTRANODE_LAYOUT_H_

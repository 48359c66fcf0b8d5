// get_dispatch_layout across nodes: as inside a node, with a count for each node beside that for
// each rank. There may be more ranks than a word has bits.
#ifndef KERNELS_DEVICE_INTERNODE_LAYOUT_H_
#define KERNELS_DEVICE_INTERNODE_LAYOUT_H_

#include "kernels/abi/deepep_internode.h"
#include "kernels/device/experts.h"

namespace deepep {

// Whether one of the first k selections of a token has an owner that `same` holds for.
template <class Same>
DEEPEP_DEVICE bool chosen_before(const DeepEpInternodeLayoutArgs& args, const ExpertSplit& split,
                                 int64_t token, int k, Same same) {
  for (int i = 0; i < k; ++i) {
    const int64_t id = load_id(args.topk_idx, args.idx_bytes, token * args.num_topk + i);
    if (id >= 0 && id < args.num_experts && same(split.owner(static_cast<int>(id)))) return true;
  }
  return false;
}

template <int kRanksPerNode, int kNumNodes>
DEEPEP_DEVICE void count_internode_layout(const DeepEpInternodeLayoutArgs& args) {
  const int per_node = known_or<kRanksPerNode>(args.ranks_per_node);
  const int num_nodes = known_or<kNumNodes>(args.num_nodes);
  const int num_ranks = per_node * num_nodes;
  const ExpertSplit split(args.num_experts, num_ranks);
  const auto grid = arch::this_grid();
  constexpr int kSharedRanks = 1024, kSharedExperts = 2048;
  DEEPEP_SHARED int32_t rank_counts[kSharedRanks];
  DEEPEP_SHARED int32_t node_counts[DEEPEP_MAX_NODES];
  DEEPEP_SHARED int32_t expert_counts[kSharedExperts];
  int32_t* scratch = args.scratch;  // [arrivals, ranks, nodes, experts], zeros between two layouts
  const auto part = [=](int begin) { return scratch == nullptr ? nullptr : scratch + begin; };
  arch::Histogram per_rank(args.num_tokens_per_rank, part(1), num_ranks, rank_counts, kSharedRanks);
  arch::Histogram per_node_count(args.num_tokens_per_node, part(1 + num_ranks), num_nodes,
                                 node_counts, DEEPEP_MAX_NODES);
  arch::Histogram per_expert(args.num_tokens_per_expert, part(1 + num_ranks + num_nodes),
                             args.num_experts, expert_counts, kSharedExperts);
  for (int64_t token = grid.thread(); token < args.num_tokens; token += grid.num_threads()) {
    uint8_t* in_rank = args.is_token_in_rank + token * num_ranks;
    for (int rank = 0; rank < num_ranks; ++rank) in_rank[rank] = 0;
    for (int k = 0; k < args.num_topk; ++k) {
      const int64_t id = load_id(args.topk_idx, args.idx_bytes, token * args.num_topk + k);
      if (id < 0 || id >= args.num_experts) continue;
      per_expert.add(static_cast<int>(id));
      const int owner = split.owner(static_cast<int>(id)), node = owner / per_node;
      if (chosen_before(args, split, token, k, [=](int rank) { return rank == owner; })) continue;
      in_rank[owner] = 1;
      per_rank.add(owner);
      if (chosen_before(args, split, token, k, [=](int r) { return r / per_node == node; }))
        continue;
      per_node_count.add(node);
    }
  }
  per_rank.flush();
  per_node_count.flush();
  per_expert.flush();
  auto* arrivals = reinterpret_cast<uint32_t*>(scratch);
  if (!grid.is_last_block(arrivals)) return;
  per_rank.finish();
  per_node_count.finish();
  per_expert.finish();
  if (arrivals != nullptr && arch::this_block().lane() == 0) *arrivals = 0;
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTERNODE_LAYOUT_H_

// internode_sm90_hany_bf16_rany: combine. Generated, do not edit.
// Template: codegen/templates/internode/combine.cu.j2
// Regenerate: python -m codegen render internode_sm90_hany_bf16_rany combine

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/arch/sm90.cuh"
#include "kernels/host/checks.h"
#include "kernels/device/arch/gpu_network.cuh"
#include "kernels/device/operation.h"
#include "kernels/device/internode/combine.h"
#include "kernels/host/internode_checks.h"

namespace deepep {

// This configuration; 0 says that a value is given at run time.
inline constexpr char kVariant[] = "internode_sm90_hany_bf16_rany";
inline constexpr int kHidden = 0;  // Elements of a token.
inline constexpr int kElemBytes = 2;
inline constexpr int kNumRanks = 0;  // Ranks of one memory domain.
inline constexpr int kNumNodes = 0;  // Memory domains.

namespace {

DEEPEP_KERNEL(arch::kRailGatherThreads)
combine_kernel(const DeepEpContext context, const DeepEpNetwork facts,
               const DeepEpInternodeCombineArgs args) {
  const int per_node = known_or<kNumRanks>(context.num_ranks);
  const int num_nodes = known_or<kNumNodes>(facts.num_nodes);
  const int hidden = known_or<kHidden>(args.hidden);
  const int64_t row_bytes = int64_t{hidden} * kCombineElemBytes;
  const auto block = arch::this_block();
  const auto team = arch::this_team();
  const auto grid = arch::this_grid();
  Operation op(context, DEEPEP_OP_COMBINE);
  if (op.has_failed()) return;

  // What peers cannot read where it lies is copied first; the last block to finish that publishes.
  const arch::Network network(facts);
  const CombineMessage message(row_bytes, args.num_topk);
  const Rail rail(op, network, facts, kRailCombine, num_nodes, per_node, message.total);
  const int64_t weight_bytes = int64_t{args.num_recv} * args.num_topk * sizeof(float);
  stage(args.x, args.x_exported, args.num_recv * row_bytes);
  stage(args.topk_weights, args.topk_weights_exported, weight_bytes);
  const uint64_t signature = pack_signature(row_bytes, 0, args.num_topk, 0, 0);
  if (grid.is_last_block(&op.state()->staged)) {
    const DeepEpLocator at[5] = {args.at_x, args.at_topk_weights, DEEPEP_NO_LOCATOR,
                                 DEEPEP_NO_LOCATOR, DEEPEP_NO_LOCATOR};
    publish_entry(op, block, per_node, at, args.num_recv, signature);
    if (block.lane() < team.size()) send_hello(rail, team, signature);
  }
  if (!wait_entries(op, block, per_node, signature)) return;

  DEEPEP_SHARED Source sources[kNumRanks != 0 ? kNumRanks : DEEPEP_MAX_RANKS];
  find_sources(op, block, per_node, sources);

  // A sum for each node and token, over the network where it is of another node; then their sum.
  const Reduction<kNumRanks, kNumNodes> plan{rail,   args,    sources,  per_node,
                                             hidden, message, signature};
  run_combine(plan, team);

  // Peers may reuse their rows once everyone of the node has read them.
  if (grid.is_last_block(&op.state()->arrivals)) {
    if (op.has_failed()) return withdraw_entry(op, block, per_node);
    send_done(op, block, per_node);
    if (wait_done(op, block, per_node)) op.close();
  }
}
}  // namespace
}  // namespace deepep

DEEPEP_API int32_t deepep_internode_combine(const DeepEpInternodeCombineArgs* args) {
  using namespace deepep;
  if (int32_t status = check_struct(args)) return status;
  if (int32_t status = check_network<kNumRanks, kNumNodes>(args->context, args->network)) {
    return status;
  }
  if (int32_t status = check_row(args->hidden, kHidden, kCombineElemBytes)) return status;
  if (int32_t status = check_count("num_tokens", args->num_tokens)) return status;
  if (int32_t status = check_count("num_recv", args->num_recv)) return status;
  if (int32_t status = check_range("num_topk", args->num_topk, 0, DEEPEP_MAX_TOPK)) return status;
  const DeepEpContext& context = *args->context;
  const DeepEpNetwork& network = *args->network;
  const int64_t row_bytes = int64_t{args->hidden} * kCombineElemBytes;
  const CombineMessage message(row_bytes, args->num_topk);
  if (int32_t status = check_rings(context, network, kRailCombine, message.total)) return status;
  const auto shape = arch::rail_gather_shape(args->num_blocks);
  const int32_t status = arch::launch<combine_kernel>(args->stream, shape, context, network, *args);
  return status != DEEPEP_OK ? status : arch::outcome(context);
}

// intranode_host_hany_fp8_rany: combine. Generated, do not edit.
// Template: codegen/templates/intranode/combine.cu.j2
// Regenerate: python -m codegen render intranode_host_hany_fp8_rany combine

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/arch/host.h"
#include "kernels/host/checks.h"
#include "kernels/device/operation.h"
#include "kernels/device/intranode/combine.h"

namespace deepep {

// This configuration; 0 says that a value is given at run time.
inline constexpr char kVariant[] = "intranode_host_hany_fp8_rany";
inline constexpr int kHidden = 0;  // Elements of a token.
inline constexpr int kElemBytes = 1;
inline constexpr int kNumRanks = 0;  // Ranks of one memory domain.
inline constexpr int kNumNodes = 1;  // Memory domains.

namespace {

DEEPEP_KERNEL(arch::kGatherThreads)
combine_kernel(const DeepEpContext context, const DeepEpCombineArgs args) {
  const int num_ranks = known_or<kNumRanks>(context.num_ranks);
  const int hidden = known_or<kHidden>(args.hidden);
  const int64_t row_bytes = int64_t{hidden} * kCombineElemBytes;
  const auto block = arch::this_block();
  const auto team = arch::this_team();
  const auto grid = arch::this_grid();
  Operation op(context, DEEPEP_OP_COMBINE);
  if (op.has_failed()) return;

  // What peers cannot read where it lies is copied first; the last block to finish that publishes.
  const int64_t weight_bytes = int64_t{args.num_recv} * args.num_topk * sizeof(float);
  stage(args.x, args.x_exported, args.num_recv * row_bytes);
  stage(args.topk_weights, args.topk_weights_exported, weight_bytes);
  const uint64_t signature = pack_signature(row_bytes, 0, args.num_topk, 0, 0);
  if (grid.is_last_block(&op.state()->staged)) {
    const DeepEpLocator at[5] = {args.at_x, args.at_topk_weights, DEEPEP_NO_LOCATOR,
                                 DEEPEP_NO_LOCATOR, DEEPEP_NO_LOCATOR};
    publish_entry(op, block, num_ranks, at, args.num_recv, signature);
  }
  if (!wait_entries(op, block, num_ranks, signature)) return;

  DEEPEP_SHARED Source sources[kNumRanks != 0 ? kNumRanks : DEEPEP_MAX_RANKS];
  find_sources(op, block, num_ranks, sources);

  // Pull, sum in FP32, round once, write once.
  const GatherPlan plan{args, sources, num_ranks, row_bytes};
  arch::gather_rows<kNumRanks>(grid, team, plan, args.num_tokens, num_ranks, hidden);
  gather_weights(args, sources, num_ranks);

  // Peers may reuse their rows once everyone has read them.
  if (grid.is_last_block(&op.state()->arrivals)) {
    send_done(op, block, num_ranks);
    if (wait_done(op, block, num_ranks)) op.close();
  }
}
}  // namespace
}  // namespace deepep

DEEPEP_API int32_t deepep_combine(const DeepEpCombineArgs* args) {
  using namespace deepep;
  if (int32_t status = check_struct(args)) return status;
  if (int32_t status = check_context(args->context, kNumRanks)) return status;
  if (int32_t status = check_row(args->hidden, kHidden, kCombineElemBytes)) return status;
  if (int32_t status = check_count("num_tokens", args->num_tokens)) return status;
  if (int32_t status = check_count("num_recv", args->num_recv)) return status;
  if (int32_t status = check_range("num_topk", args->num_topk, 0, DEEPEP_MAX_TOPK)) return status;
  const DeepEpContext& context = *args->context;
  const int64_t row_bytes = int64_t{args->hidden} * kCombineElemBytes;
  const auto shape = arch::gather_shape(args->num_blocks, context.num_ranks, row_bytes);
  const int32_t status = arch::launch<combine_kernel>(args->stream, shape, context, *args);
  return status != DEEPEP_OK ? status : arch::outcome(context);
}

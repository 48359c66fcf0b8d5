// intranode_host_hany_fp8_rany: notify. Generated, do not edit.
// Template: codegen/templates/intranode/notify.cu.j2
// Regenerate: python -m codegen render intranode_host_hany_fp8_rany notify

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/arch/host.h"
#include "kernels/host/checks.h"
#include "kernels/device/operation.h"
#include "kernels/device/intranode/layout.h"
#include "kernels/device/intranode/notify.h"

namespace deepep {

// This configuration; 0 says that a value is given at run time.
inline constexpr char kVariant[] = "intranode_host_hany_fp8_rany";
inline constexpr int kHidden = 0;  // Elements of a token.
inline constexpr int kElemBytes = 1;
inline constexpr int kNumRanks = 0;  // Ranks of one memory domain.
inline constexpr int kNumNodes = 1;  // Memory domains.

namespace {

DEEPEP_KERNEL(arch::kCountThreads)
layout_kernel(const DeepEpLayoutArgs args) { count_layout<kNumRanks>(args); }

// Block 0 exchanges the counts; all blocks share the destinations whose rows they number.
DEEPEP_KERNEL(arch::kExchangeThreads)
notify_kernel(const DeepEpContext context, const DeepEpNotifyArgs args) {
  const int num_ranks = known_or<kNumRanks>(context.num_ranks);
  const auto block = arch::this_block();
  const auto grid = arch::this_grid();
  Operation op(context, DEEPEP_OP_NOTIFY);
  if (op.has_failed()) return;

  bool ok = true;
  if (grid.block() == 0) {
    push_counts(op, block, args, num_ranks);
    ok = sum_counts(op, block, args, num_ranks);
    if (ok) report_counts(op, block, args, num_ranks);  // the host goes on beside the rest
  }
  for (int peer = grid.block(); ok && peer < num_ranks; peer += grid.num_blocks()) {
    place_rows(op, block, args, num_ranks, peer);
    ok = op.ok(block);
  }
  if (grid.is_last_block(&op.state()->arrivals) && !op.has_failed()) op.close();
}
}  // namespace
}  // namespace deepep

DEEPEP_API int32_t deepep_layout(const DeepEpLayoutArgs* args) {
  using namespace deepep;
  if (int32_t status = check_struct(args)) return status;
  if (int32_t status = check_fixed("num_ranks", args->num_ranks, kNumRanks)) return status;
  if (int32_t status = check_ranks(args->num_ranks)) return status;
  if (int32_t status = check_experts(args->num_experts, args->num_ranks)) return status;
  if (int32_t status = check_count("num_tokens", args->num_tokens)) return status;
  if (int32_t status = check_topk(args->num_topk, args->idx_bytes)) return status;
  if (int32_t status = check_ids<arch::kReadsArguments>(*args)) return status;
  const int64_t words = int64_t{1} + args->num_ranks + args->num_experts;
  if (int32_t status = check_scratch<arch::kReadsArguments>(args->scratch, words)) return status;
  const auto shape = arch::count_shape(args->num_tokens, args->num_blocks);
  return arch::launch<layout_kernel>(args->stream, shape, *args);
}

DEEPEP_API int32_t deepep_notify(const DeepEpNotifyArgs* args) {
  using namespace deepep;
  if (int32_t status = check_struct(args)) return status;
  if (int32_t status = check_context(args->context, kNumRanks)) return status;
  if (int32_t status = check_experts(args->num_experts, args->context->num_ranks)) return status;
  if (int32_t status = check_count("num_tokens", args->num_tokens)) return status;
  if (int32_t status = check_counts<arch::kReadsArguments>(*args)) return status;
  const DeepEpContext& context = *args->context;
  const auto shape = arch::exchange_shape(context.num_ranks, args->num_blocks);
  const int32_t status = arch::launch<notify_kernel>(args->stream, shape, context, *args);
  return status != DEEPEP_OK ? status : arch::outcome(context);
}

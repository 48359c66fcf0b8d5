// lowlatency_host_hany_fp8_rany: combine. Generated, do not edit.
// Template: codegen/templates/lowlatency/combine.cu.j2
// Regenerate: python -m codegen render lowlatency_host_hany_fp8_rany combine

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/arch/host.h"
#include "kernels/host/checks.h"
#include "kernels/device/lowlatency/combine.h"
#include "kernels/host/lowlatency_checks.h"

namespace deepep {

// This configuration; 0 says that a value is given at run time.
inline constexpr char kVariant[] = "lowlatency_host_hany_fp8_rany";
inline constexpr int kHidden = 0;  // Elements of a token.
inline constexpr int kElemBytes = 1;
inline constexpr int kNumRanks = 0;  // Ranks of one memory domain.
inline constexpr int kNumNodes = 1;  // Memory domains.

namespace {

constexpr int kCombineElemBytes = 2;  // BF16, whatever dispatch carried

// Says where this rank's rows are, or sends them to their tokens' ranks.
DEEPEP_KERNEL(arch::kMoveThreads)
send_kernel(const DeepEpContext context, const DeepEpLowLatencyCombineArgs args) {
  const int num_ranks = known_or<kNumRanks>(context.num_ranks);
  const auto block = arch::this_block();
  const auto team = arch::this_team();
  const auto grid = arch::this_grid();
  const int64_t row_bytes = int64_t{known_or<kHidden>(args.hidden)} * kCombineElemBytes;
  const CombineJob job(args, num_ranks, row_bytes);
  Sequence op(context, DEEPEP_OP_LOW_LATENCY_COMBINE, DEEPEP_SEND, args.mask);
  if (op.has_failed() || !op.begin(block, num_ranks)) return;
  if (!job.is_pulled()) push_rows(op, team, job);
  if (grid.is_last_block(&op.state()->staged)) {
    send_ready(op, block, job);
    op.close_send(block);
  }
}

// Between the sending and the summing kernel where rows travel in LogFMT.
DEEPEP_KERNEL(arch::kMoveThreads)
decode_kernel(const DeepEpContext context, const DeepEpLowLatencyCombineArgs args) {
  const int num_ranks = known_or<kNumRanks>(context.num_ranks);
  const auto block = arch::this_block();
  const auto team = arch::this_team();
  const int64_t row_bytes = int64_t{known_or<kHidden>(args.hidden)} * kCombineElemBytes;
  const CombineJob job(args, num_ranks, row_bytes);
  Sequence op(context, DEEPEP_OP_LOW_LATENCY_COMBINE, DEEPEP_RECEIVE, args.mask);
  if (op.has_failed()) return;
  DEEPEP_SHARED char* places[kNumRanks != 0 ? kNumRanks : DEEPEP_MAX_RANKS];
  if (await_ready(op, block, job, places, nullptr)) decode_slots(op, team, job);
}

// Sums; with both phases it first does what the sending kernel does.
DEEPEP_KERNEL(arch::kChoiceThreads)
receive_kernel(const DeepEpContext context, const DeepEpLowLatencyCombineArgs args) {
  const int num_ranks = known_or<kNumRanks>(context.num_ranks);
  const int hidden = known_or<kHidden>(args.hidden);
  const auto block = arch::this_block();
  const auto team = arch::this_team();
  const auto grid = arch::this_grid();
  const CombineJob job(args, num_ranks, int64_t{hidden} * kCombineElemBytes);
  Sequence op(context, DEEPEP_OP_LOW_LATENCY_COMBINE, args.phases, args.mask);
  if (op.has_failed()) return;
  const bool sends = (args.phases & DEEPEP_SEND) != 0;
  if (sends) {
    if (!op.begin(block, num_ranks)) return;
    if (!job.is_pulled()) push_rows(op, team, job);
    // The first block, or where all have sent rows the last.
    if (job.is_pulled() ? grid.block() == 0 : grid.is_last_block(&op.state()->staged)) {
      send_ready(op, block, job);
    }
  }
  DEEPEP_SHARED char* places[kNumRanks != 0 ? kNumRanks : DEEPEP_MAX_RANKS];
  int64_t* wait_stats = grid.block() == 0 ? args.wait_stats : nullptr;
  if (!await_ready(op, block, job, places, wait_stats)) return;

  const ChoicePlan plan{op, job, places};
  arch::gather_rows<DEEPEP_MAX_TOPK>(grid, team, plan, args.num_tokens, args.num_topk, hidden);

  // Owners may write to rows that were read where they lay once everyone has read them.
  if (grid.is_last_block(&op.state()->arrivals)) {
    op.send_done(block, num_ranks);
    if (job.is_pulled() && !op.await_all_done(block, num_ranks, nullptr)) return;
    if (sends) op.close_send(block);
    op.close_receive(block, job.is_pulled());
  }
}
}  // namespace
}  // namespace deepep

DEEPEP_API int32_t deepep_low_latency_combine(const DeepEpLowLatencyCombineArgs* args) {
  using namespace deepep;
  if (int32_t status = check_struct(args)) return status;
  if (int32_t status = check_context(args->context, kNumRanks)) return status;
  if (int32_t status = check_row(args->hidden, kHidden, kCombineElemBytes)) return status;
  if (int32_t status = check_low_latency_combine(*args)) return status;
  const DeepEpContext& context = *args->context;
  const int64_t row_bytes = int64_t{args->hidden} * kCombineElemBytes;
  DeepEpLowLatencyCombineArgs receive = *args;
  const bool at_once = args->phases == DEEPEP_SEND_AND_RECEIVE && !args->use_logfmt;
  const bool moves = at_once && args->at_x == DEEPEP_NO_LOCATOR;
  if (!at_once && (args->phases & DEEPEP_SEND)) {
    const auto move = arch::move_shape(args->num_blocks, row_bytes);
    int32_t status = arch::launch<send_kernel>(args->stream, move, context, *args);
    if (status == DEEPEP_OK) status = arch::outcome(context);
    if (status != DEEPEP_OK) return status;
    receive.phases = args->phases & ~DEEPEP_SEND;
  }
  if (receive.phases == 0) return DEEPEP_OK;
  if (args->use_logfmt) {
    const auto move = arch::move_shape(args->num_blocks, row_bytes);
    int32_t status = arch::launch<decode_kernel>(args->stream, move, context, receive);
    if (status == DEEPEP_OK) status = arch::outcome(context);
    if (status != DEEPEP_OK) return status;
  }
  const auto shape = arch::choice_shape(args->num_blocks, row_bytes, moves);
  const int32_t status = arch::launch<receive_kernel>(args->stream, shape, context, receive);
  return status != DEEPEP_OK ? status : arch::outcome(context);
}

// lowlatency_host_hany_fp8_rany: dispatch. Generated, do not edit.
// Template: codegen/templates/lowlatency/dispatch.cu.j2
// Regenerate: python -m codegen render lowlatency_host_hany_fp8_rany dispatch

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/arch/host.h"
#include "kernels/host/checks.h"
#include "kernels/device/lowlatency/dispatch.h"
#include "kernels/host/lowlatency_checks.h"

namespace deepep {

// This configuration; 0 says that a value is given at run time.
inline constexpr char kVariant[] = "lowlatency_host_hany_fp8_rany";
inline constexpr int kHidden = 0;  // Elements of a token.
inline constexpr int kElemBytes = 1;
inline constexpr int kNumRanks = 0;  // Ranks of one memory domain.
inline constexpr int kNumNodes = 1;  // Memory domains.

namespace {

template <bool kCast, class Team, class Places>
DEEPEP_DEVICE void send_rows(Sequence& op, Team team, const DispatchJob& job,
                             const Places& places) {
  if constexpr (kCast) return cast_rows(op, team, job, places);
  copy_rows(op, team, job, places);
}

// Counts first, then every row once, straight to its place.
template <bool kCast>
DEEPEP_KERNEL(arch::dispatch_threads(!kCast))
direct_kernel(const DeepEpContext context, const DeepEpLowLatencyDispatchArgs args) {
  const int num_ranks = known_or<kNumRanks>(context.num_ranks);
  const auto block = arch::this_block();
  const auto team = arch::this_team();
  const auto grid = arch::this_grid();
  const DispatchJob job(args, num_ranks, int64_t{known_or<kHidden>(args.hidden)} * kElemBytes);
  Sequence op(context, DEEPEP_OP_LOW_LATENCY_DISPATCH, args.phases, nullptr);
  if (op.has_failed() || !op.begin(block, num_ranks)) return;

  // One block tells what peers wait for, another collects what they tell.
  const bool first = grid.block() == 0, last = grid.block() == grid.num_blocks() - 1;
  const Head head = job.head(args.at);
  if (last) publish_head(op, block, num_ranks, head);
  number_rows(block, job);
  if (first) send_counts(op, block, job, true);
  DEEPEP_SHARED char* places[kNumRanks != 0 ? kNumRanks : DEEPEP_MAX_RANKS];
  int64_t* wait_stats = first ? args.wait_stats : nullptr;
  if (!await_heads(op, block, num_ranks, head, places, wait_stats)) return;
  if (last && !collect_counts(op, block, job)) return;
  send_rows<kCast>(op, team, job, DirectPlaces{job, places});
  if (!op.ok(block)) return;

  // The last block to come closes for all.
  if (grid.is_last_block(&op.state()->arrivals)) {
    op.send_done(block, num_ranks);
    if (op.await_all_done(block, num_ranks, args.wait_stats)) {
      op.close_send(block);
      op.close_receive(block, true);
    }
  }
}

// Rows to the receivers' workspaces, and from this rank's workspace to their place: one, the other,
// or both, as args.phases says.
template <bool kCast>
DEEPEP_KERNEL(arch::dispatch_threads(true))
collected_kernel(const DeepEpContext context, const DeepEpLowLatencyDispatchArgs args) {
  const int num_ranks = known_or<kNumRanks>(context.num_ranks);
  const auto block = arch::this_block();
  const auto team = arch::this_team();
  const auto grid = arch::this_grid();
  const DispatchJob job(args, num_ranks, int64_t{known_or<kHidden>(args.hidden)} * kElemBytes);
  Sequence op(context, DEEPEP_OP_LOW_LATENCY_DISPATCH, args.phases, args.mask);
  if (op.has_failed()) return;

  const Head head = job.head(DEEPEP_NO_LOCATOR);
  if (args.phases & DEEPEP_SEND) {
    if (!op.begin(block, num_ranks)) return;
    if (grid.block() == 0) publish_head(op, block, num_ranks, head);
    number_rows(block, job);
    send_rows<kCast>(op, team, job, MessagePlaces(job, op));
    if (grid.is_last_block(&op.state()->staged)) {
      send_counts(op, block, job, false);
      op.close_send(block);
    }
  }
  if (args.phases & DEEPEP_RECEIVE) {
    DEEPEP_SHARED char* places[kNumRanks != 0 ? kNumRanks : DEEPEP_MAX_RANKS];
    if (grid.block() == 0) {
      if (!await_heads(op, block, num_ranks, head, places, args.wait_stats)) return;
      if (!collect_counts(op, block, job)) return;
      op.set_collected(block);
    }
    if (!op.await_collected(block)) return;
    collect_rows(op, team, job);
    if (grid.is_last_block(&op.state()->arrivals)) {
      op.send_done(block, num_ranks);
      op.close_receive(block, false);
    }
  }
}

template <bool kCast>
int32_t start(const DeepEpLowLatencyDispatchArgs& args) {
  const DeepEpContext& context = *args.context;
  const bool staged = !kCast || !args.direct;
  const auto shape = arch::dispatch_shape(args.num_blocks, int64_t{args.hidden} * kElemBytes,
                                          args.num_experts, staged);
  const int32_t status =
      args.direct ? arch::launch<direct_kernel<kCast>>(args.stream, shape, context, args)
                  : arch::launch<collected_kernel<kCast>>(args.stream, shape, context, args);
  return status != DEEPEP_OK ? status : arch::outcome(context);
}
}  // namespace
}  // namespace deepep

DEEPEP_API int32_t deepep_low_latency_dispatch(const DeepEpLowLatencyDispatchArgs* args) {
  using namespace deepep;
  if (int32_t status = check_struct(args)) return status;
  if (int32_t status = check_context(args->context, kNumRanks)) return status;
  if (int32_t status = check_row(args->hidden, kHidden, kElemBytes)) return status;
  if (int32_t status = check_low_latency_dispatch(*args, kElemBytes)) return status;
  if (args->cast != DEEPEP_CAST_NONE) return start<true>(*args);
  return start<false>(*args);
}

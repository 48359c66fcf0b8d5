// intranode_host_hany_fp8_rany: dispatch. Generated, do not edit.
// Template: codegen/templates/intranode/dispatch.cu.j2
// Regenerate: python -m codegen render intranode_host_hany_fp8_rany dispatch

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/arch/host.h"
#include "kernels/host/checks.h"
#include "kernels/device/operation.h"
#include "kernels/device/intranode/dispatch.h"

namespace deepep {

// This configuration; 0 says that a value is given at run time.
inline constexpr char kVariant[] = "intranode_host_hany_fp8_rany";
inline constexpr int kHidden = 0;  // Elements of a token.
inline constexpr int kElemBytes = 1;
inline constexpr int kNumRanks = 0;  // Ranks of one memory domain.
inline constexpr int kNumNodes = 1;  // Memory domains.

namespace {

DEEPEP_KERNEL(arch::kSendThreads)
dispatch_kernel(const DeepEpContext context, const DeepEpDispatchArgs args) {
  const int num_ranks = known_or<kNumRanks>(context.num_ranks);
  const int64_t row_bytes = int64_t{known_or<kHidden>(args.hidden)} * kElemBytes;
  const auto block = arch::this_block();
  const auto team = arch::this_team();
  const auto grid = arch::this_grid();
  Operation op(context, DEEPEP_OP_DISPATCH);
  if (op.has_failed()) return;

  // Where my tensors are; where theirs are.
  const uint64_t signature =
      pack_signature(row_bytes, args.num_scales, args.num_topk, args.idx_bytes, args.num_experts);
  if (grid.block() == 0) {
    const DeepEpLocator at[5] = {args.at_x, args.at_x_scales, args.at_topk_idx,
                                 args.at_topk_weights, args.at_src_idx};
    publish_entry(op, block, num_ranks, at, args.recv_capacity, signature);
  }
  if (!wait_entries(op, block, num_ranks, signature)) return;

  DEEPEP_SHARED Destination to[kNumRanks != 0 ? kNumRanks : DEEPEP_MAX_RANKS];
  find_destinations(op, block, num_ranks, to);

  // Every row once, straight to its place.
  const bool routed = has_routing(args, to, num_ranks);
  arch::RowSender sender(team, row_bytes);
  for (int64_t token = grid.team(); token < args.num_tokens; token += grid.num_teams()) {
    const auto targets = targets_of<kNumRanks>(team, args, to, num_ranks, context.rank, token);
    send_row(team, sender, args, to, targets, row_bytes, token);
    send_scales(team, args, to, targets, token);
    if (routed) {
      send_routing(team, args, to, targets, ExpertSplit(args.num_experts, num_ranks), 0, token,
                   static_cast<int32_t>(token));
    }
  }
  sender.finish(team);
  const int32_t received = num_received(args, context.rank, num_ranks);
  if (args.fill_tail) fill_tail(args, received);

  // The last block closes for all.
  if (grid.is_last_block(&op.state()->arrivals)) {
    send_done(op, block, num_ranks);
    check_capacity(op, block, args, received);
    if (wait_done(op, block, num_ranks)) op.close();
  }
}
}  // namespace
}  // namespace deepep

DEEPEP_API int32_t deepep_dispatch(const DeepEpDispatchArgs* args) {
  using namespace deepep;
  if (int32_t status = check_struct(args)) return status;
  if (int32_t status = check_context(args->context, kNumRanks)) return status;
  if (int32_t status = check_row(args->hidden, kHidden, kElemBytes)) return status;
  if (int32_t status = check_count("num_tokens", args->num_tokens)) return status;
  if (int32_t status = check_count("recv_capacity", args->recv_capacity)) return status;
  if (int32_t status = check_topk(args->num_topk, args->idx_bytes)) return status;
  if (int32_t status = check_range("num_scales", args->num_scales, 1, kMaxScales)) return status;
  const DeepEpContext& context = *args->context;
  const auto shape = arch::send_shape(args->num_blocks, int64_t{args->hidden} * kElemBytes);
  const int32_t status = arch::launch<dispatch_kernel>(args->stream, shape, context, *args);
  return status != DEEPEP_OK ? status : arch::outcome(context);
}

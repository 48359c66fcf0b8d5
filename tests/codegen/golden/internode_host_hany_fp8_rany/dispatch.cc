// internode_host_hany_fp8_rany: dispatch. Generated, do not edit.
// Template: codegen/templates/internode/dispatch.cu.j2
// Regenerate: python -m codegen render internode_host_hany_fp8_rany dispatch

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/arch/host.h"
#include "kernels/host/checks.h"
#include "kernels/device/arch/host_network.h"
#include "kernels/device/operation.h"
#include "kernels/device/internode/dispatch.h"
#include "kernels/host/internode_checks.h"

namespace deepep {

// This configuration; 0 says that a value is given at run time.
inline constexpr char kVariant[] = "internode_host_hany_fp8_rany";
inline constexpr int kHidden = 0;  // Elements of a token.
inline constexpr int kElemBytes = 1;
inline constexpr int kNumRanks = 0;  // Ranks of one memory domain.
inline constexpr int kNumNodes = 0;  // Memory domains.

namespace {

DEEPEP_KERNEL(arch::kRailSendThreads)
dispatch_kernel(const DeepEpContext context, const DeepEpNetwork facts,
                const DeepEpInternodeDispatchArgs args) {
  const int per_node = known_or<kNumRanks>(context.num_ranks);
  const int num_nodes = known_or<kNumNodes>(facts.num_nodes);
  const int64_t row_bytes = int64_t{known_or<kHidden>(args.hidden)} * kElemBytes;
  const auto block = arch::this_block();
  const auto team = arch::this_team();
  const auto grid = arch::this_grid();
  Operation op(context, DEEPEP_OP_DISPATCH);
  if (op.has_failed()) return;

  // Where my tensors are, for the node; that I have begun, for the rails.
  const arch::Network network(facts);
  const DispatchMessage message(per_node, row_bytes, args.num_scales, args.num_topk,
                                args.idx_bytes);
  const Rail rail(op, network, facts, kRailDispatch, num_nodes, per_node, message.total);
  const uint64_t signature =
      pack_signature(row_bytes, args.num_scales, args.num_topk, args.idx_bytes, args.num_experts);
  if (grid.block() == 0) {
    const DeepEpLocator at[5] = {args.at_x, args.at_x_scales, args.at_topk_idx,
                                 args.at_topk_weights, args.at_src_idx};
    publish_entry(op, block, per_node, at, args.recv_capacity, signature);
    if (grid.team() == 0) send_hello(rail, team, signature);
  }
  if (!wait_entries(op, block, per_node, signature)) return;

  DEEPEP_SHARED Destination to[kNumRanks != 0 ? kNumRanks : DEEPEP_MAX_RANKS];
  find_destinations(op, block, per_node, to);

  // Rows inside the node to their place; rows for other nodes once over the network each.
  const DeepEpDispatchArgs inner = inside_node(args);
  const bool routed = has_routing(inner, to, per_node);
  arch::RowSender sender(team, row_bytes);
  const Forwarding<kNumRanks> plan{rail,      args,    to,        sender, per_node,
                                   row_bytes, message, signature, routed};
  run_dispatch(plan, team);
  sender.finish(team);
  const int32_t received = args.recv_prefix[num_nodes * per_node - 1];
  if (args.fill_tail) fill_tail(inner, received);

  // The last block closes for all; nothing that this rank forwards is on its way any more.
  if (grid.is_last_block(&op.state()->arrivals)) {
    if (op.has_failed()) return withdraw_entry(op, block, per_node);
    send_done(op, block, per_node);
    check_capacity(op, block, inner, received);
    if (wait_done(op, block, per_node)) op.close();
  }
}
}  // namespace
}  // namespace deepep

DEEPEP_API int32_t deepep_internode_dispatch(const DeepEpInternodeDispatchArgs* args) {
  using namespace deepep;
  if (int32_t status = check_struct(args)) return status;
  if (int32_t status = check_network<kNumRanks, kNumNodes>(args->context, args->network)) {
    return status;
  }
  if (int32_t status = check_row(args->hidden, kHidden, kElemBytes)) return status;
  if (int32_t status = check_count("num_tokens", args->num_tokens)) return status;
  if (int32_t status = check_count("recv_capacity", args->recv_capacity)) return status;
  if (int32_t status = check_topk(args->num_topk, args->idx_bytes)) return status;
  if (int32_t status = check_range("num_scales", args->num_scales, 1, kMaxScales)) return status;
  const DeepEpContext& context = *args->context;
  const DeepEpNetwork& network = *args->network;
  const int64_t row_bytes = int64_t{args->hidden} * kElemBytes;
  const DispatchMessage message(context.num_ranks, row_bytes, args->num_scales, args->num_topk,
                                args->idx_bytes);
  if (int32_t status = check_rings(context, network, kRailDispatch, message.total)) return status;
  const auto shape = arch::rail_send_shape(args->num_blocks, row_bytes);
  const int32_t status =
      arch::launch<dispatch_kernel>(args->stream, shape, context, network, *args);
  return status != DEEPEP_OK ? status : arch::outcome(context);
}

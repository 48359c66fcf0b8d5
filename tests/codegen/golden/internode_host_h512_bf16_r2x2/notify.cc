// internode_host_h512_bf16_r2x2: notify. Generated, do not edit.
// Template: codegen/templates/internode/notify.cu.j2
// Regenerate: python -m codegen render internode_host_h512_bf16_r2x2 notify

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/arch/host.h"
#include "kernels/host/checks.h"
#include "kernels/device/arch/host_network.h"
#include "kernels/device/operation.h"
#include "kernels/device/internode/layout.h"
#include "kernels/device/internode/notify.h"
#include "kernels/host/internode_checks.h"

namespace deepep {

// This configuration; 0 says that a value is given at run time.
inline constexpr char kVariant[] = "internode_host_h512_bf16_r2x2";
inline constexpr int kHidden = 512;  // Elements of a token.
inline constexpr int kElemBytes = 2;
inline constexpr int kNumRanks = 2;  // Ranks of one memory domain.
inline constexpr int kNumNodes = 2;  // Memory domains.

namespace {

DEEPEP_KERNEL(arch::kCountThreads)
layout_kernel(const DeepEpInternodeLayoutArgs args) {
  count_internode_layout<kNumRanks, kNumNodes>(args);
}

// Block 0 exchanges the counts; all blocks share the ranks and nodes whose tokens they number.
DEEPEP_KERNEL(arch::kRailExchangeThreads)
notify_kernel(const DeepEpContext context, const DeepEpNetwork facts,
              const DeepEpInternodeNotifyArgs args) {
  const int per_node = known_or<kNumRanks>(context.num_ranks);
  const int num_nodes = known_or<kNumNodes>(facts.num_nodes);
  const auto block = arch::this_block();
  const auto grid = arch::this_grid();
  Operation op(context, DEEPEP_OP_NOTIFY);
  if (op.has_failed()) return;

  const arch::Network network(facts);
  const Exchange exchange(op, network, facts, args, num_nodes, per_node);
  bool ok = true;
  if (grid.block() == 0) {
    send_counts(exchange, block);
    ok = await_counts_of_rail(exchange, block);
    if (ok) push_counts_inside(exchange, block);
    ok = ok && sum_column(exchange, block);
    if (ok) report_totals(exchange, block);  // the host goes on beside the rest
    ok = ok && await_firsts(exchange, block);
  }
  const int num_ranks = num_nodes * per_node;
  for (int i = grid.block(); ok && i < num_ranks + num_nodes; i += grid.num_blocks()) {
    if (i < num_ranks) {
      number_rows(exchange, block, i);
    } else {
      number_for_node(exchange, block, i - num_ranks);
    }
    ok = op.ok(block);
  }
  if (grid.is_last_block(&op.state()->arrivals) && !op.has_failed()) op.close();
}
}  // namespace
}  // namespace deepep

DEEPEP_API int32_t deepep_internode_layout(const DeepEpInternodeLayoutArgs* args) {
  using namespace deepep;
  if (int32_t status = check_struct(args)) return status;
  const int per_node = args->ranks_per_node;
  if (int32_t status = check_fixed("ranks_per_node", per_node, kNumRanks)) return status;
  if (int32_t status = check_fixed("num_nodes", args->num_nodes, kNumNodes)) return status;
  if (int32_t status = check_nodes(args->num_nodes, per_node)) return status;
  const int64_t num_ranks = int64_t{args->num_nodes} * per_node;
  if (int32_t status = check_experts(args->num_experts, num_ranks)) return status;
  if (int32_t status = check_count("num_tokens", args->num_tokens)) return status;
  if (int32_t status = check_topk(args->num_topk, args->idx_bytes)) return status;
  if (int32_t status = check_ids<arch::kReadsArguments>(*args)) return status;
  const int64_t words = 1 + num_ranks + args->num_nodes + args->num_experts;
  if (int32_t status = check_scratch<arch::kReadsArguments>(args->scratch, words)) return status;
  const auto shape = arch::count_shape(args->num_tokens, args->num_blocks);
  return arch::launch<layout_kernel>(args->stream, shape, *args);
}

DEEPEP_API int32_t deepep_internode_notify(const DeepEpInternodeNotifyArgs* args) {
  using namespace deepep;
  if (int32_t status = check_struct(args)) return status;
  if (int32_t status = check_network<kNumRanks, kNumNodes>(args->context, args->network)) {
    return status;
  }
  const DeepEpContext& context = *args->context;
  const DeepEpNetwork& network = *args->network;
  const int64_t num_ranks = int64_t{network.num_nodes} * context.num_ranks;
  if (int32_t status = check_experts(args->num_experts, num_ranks)) return status;
  if (int32_t status = check_count("num_tokens", args->num_tokens)) return status;
  if (int32_t status = check_internode_counts<arch::kReadsArguments>(*args)) return status;
  const auto shape = arch::exchange_shape(static_cast<int>(num_ranks) + network.num_nodes,
                                          args->num_blocks, arch::kRailExchangeThreads);
  const int32_t status = arch::launch<notify_kernel>(args->stream, shape, context, network, *args);
  return status != DEEPEP_OK ? status : arch::outcome(context);
}

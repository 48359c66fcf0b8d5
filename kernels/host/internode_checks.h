// What the entry functions across nodes refuse before anything is sent; checks.h has the rest.
#ifndef KERNELS_HOST_INTERNODE_CHECKS_H_
#define KERNELS_HOST_INTERNODE_CHECKS_H_

#include "kernels/device/internode/memory.h"
#include "kernels/host/checks.h"

namespace deepep {

inline int32_t check_nodes(int64_t num_nodes, int64_t ranks_per_node) {
  if (int32_t status = check_range("num_nodes", num_nodes, 2, DEEPEP_MAX_NODES)) return status;
  return check_range("ranks_per_node", ranks_per_node, 1, DEEPEP_MAX_RANKS);
}

// Both views of the world: the node's memory domain, and the network.
template <int kRanksPerNode, int kNumNodes>
int32_t check_network(const DeepEpContext* context, const DeepEpNetwork* network) {
  if (int32_t status = check_context(context, kRanksPerNode)) return status;
  if (int32_t status = check_struct(network)) return status;
  if (int32_t status = check_fixed("num_nodes", network->num_nodes, kNumNodes)) return status;
  if (int32_t status = check_nodes(network->num_nodes, context->num_ranks)) return status;
  if (int32_t status = check_range("node", network->node, 0, network->num_nodes - 1)) return status;
  return check_range("num_channels", network->num_channels, 1, DEEPEP_MAX_CHANNELS);
}

// Every ring holds a message.
inline int32_t check_rings(const DeepEpContext& context, const DeepEpNetwork& network,
                           RailKind kind, int64_t message_bytes) {
  const RailMemory at(network.num_nodes, context.num_ranks);
  const int64_t have = static_cast<int64_t>(network.bytes);
  if (Rings(at, have, kind, network.num_channels, message_bytes).slots > 0) return DEEPEP_OK;
  const int64_t need =
      network_bytes(network.num_nodes, context.num_ranks, network.num_channels, message_bytes, 1);
  return refuse(
      DEEPEP_INVALID_ARGUMENT,
      "the network memory has %lld bytes, but messages of %lld bytes on %d channels to %d "
      "nodes need at least %lld, and %lld to flow well",
      static_cast<long long>(have), static_cast<long long>(message_bytes), network.num_channels,
      network.num_nodes, static_cast<long long>(need),
      static_cast<long long>(network_bytes(network.num_nodes, context.num_ranks,
                                           network.num_channels, message_bytes, 8)));
}

// As check_counts, for nodes as well. Reads the tensors, so only where the host can.
template <bool kReadsArguments>
int32_t check_internode_counts(const DeepEpInternodeNotifyArgs& args) {
  if (!kReadsArguments) return DEEPEP_OK;
  const int64_t per_node = args.context->num_ranks, num_nodes = args.network->num_nodes;
  const auto check = [&](const char* what, int64_t index, int64_t first, int64_t width,
                         int64_t told) -> int32_t {
    int64_t marked = 0;
    for (int64_t token = 0; token < args.num_tokens; ++token) {
      const uint8_t* flags = args.is_token_in_rank + token * per_node * num_nodes + first;
      bool is_set = false;
      for (int64_t i = 0; i < width; ++i) is_set |= flags[i] != 0;
      marked += is_set;
    }
    if (marked == told) return DEEPEP_OK;
    return refuse(DEEPEP_INVALID_ARGUMENT,
                  "num_tokens_per_%s[%lld] is %lld, but is_token_in_rank marks %lld tokens for it: "
                  "take both from one get_dispatch_layout",
                  what, static_cast<long long>(index), static_cast<long long>(told),
                  static_cast<long long>(marked));
  };
  for (int64_t rank = 0; rank < per_node * num_nodes; ++rank) {
    const int64_t told = args.num_tokens_per_rank[rank];
    if (int32_t status = check("rank", rank, rank, 1, told)) return status;
  }
  for (int64_t node = 0; node < num_nodes; ++node) {
    const int64_t told = args.num_tokens_per_node[node];
    if (int32_t status = check("rdma_rank", node, node * per_node, per_node, told)) return status;
  }
  return DEEPEP_OK;
}

}  // namespace deepep

#endif  // KERNELS_HOST_INTERNODE_CHECKS_H_

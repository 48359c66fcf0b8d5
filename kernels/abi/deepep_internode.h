/* C ABI of the operations across nodes, which libraries of topology "internode" export.
 *
 * N nodes of L ranks each; rank number node * L + local. Ranks of a node share one memory domain:
 * DeepEpContext is of the node, its `rank` the number inside it. Ranks of equal number inside their
 * nodes are a rail; what crosses nodes goes along a rail, between the network memories of its
 * ranks, which all have the same layout (kernels/device/internode/memory.h).
 */
#ifndef DEEPEP_INTERNODE_H_
#define DEEPEP_INTERNODE_H_

#include "kernels/abi/deepep_kernel.h"

#define DEEPEP_MAX_NODES 64
#define DEEPEP_MAX_CHANNELS 32 /* queues between two ranks of a rail, each way and operation */

/* What carries messages on "host". Messages of one queue arrive in order, those of different queues
 * in any; `from` must not change before a message has arrived. */
typedef struct DeepEpTransport {
  void* self;
  void (*put)(void* self, int32_t queue, void* to, const void* from, uint64_t bytes);
  void (*put_word)(void* self, int32_t queue, uint64_t* to,
                   uint64_t value); /* stored with release */
  int32_t (*pause)(void* self); /* called in every wait; 1: it has let time pass */
  void (*finish)(void* self); /* the operation returns: what is on its way arrives without it */
} DeepEpTransport;

/* The network as one rank has it. Pointers are valid where the kernel runs. */
typedef struct DeepEpNetwork {
  uint32_t struct_size;
  int32_t node; /* of this rank */
  int32_t num_nodes;
  int32_t num_channels; /* the same on all ranks */
  int32_t ranks_per_node; /* these two are the context's num_ranks and rank */
  int32_t local_rank;
  void* memory; /* this rank's network memory */
  uint64_t bytes; /* of it, the same on all ranks */
  void* const* rail; /* "host": [num_nodes] the rail's network memories as mapped here; else NULL */
  const DeepEpTransport* transport; /* "host" only */
} DeepEpNetwork;

/* get_dispatch_layout. */
typedef struct DeepEpInternodeLayoutArgs {
  uint32_t struct_size;
  int32_t num_blocks;
  void* stream;
  int32_t num_nodes;
  int32_t ranks_per_node;
  int32_t num_experts;
  int32_t num_tokens;
  int32_t num_topk;
  int32_t idx_bytes; /* 4 or 8 */
  const void* topk_idx; /* [num_tokens][num_topk]; -1: no selection */
  int32_t* num_tokens_per_rank; /* [N * L] out */
  int32_t* num_tokens_per_node; /* [N] out */
  int32_t* num_tokens_per_expert; /* [num_experts] out */
  uint8_t* is_token_in_rank; /* [num_tokens][N * L] out, 0 or 1 */
  int32_t* scratch; /* [1 + N * L + N + num_experts], as in DeepEpLayoutArgs */
} DeepEpInternodeLayoutArgs;

/* Count exchange: along the rails, then inside the nodes. */
typedef struct DeepEpInternodeNotifyArgs {
  uint32_t struct_size;
  int32_t num_blocks;
  void* stream;
  const DeepEpContext* context;
  const DeepEpNetwork* network;
  int32_t num_tokens;
  int32_t num_experts;
  const int32_t* num_tokens_per_rank; /* [N * L] */
  const int32_t* num_tokens_per_node; /* [N] */
  const int32_t* num_tokens_per_expert; /* [num_experts] */
  const uint8_t* is_token_in_rank; /* [num_tokens][N * L] */
  int32_t* recv_prefix; /* [N * L] out: rows that this rank gets from ranks 0..i */
  int32_t* send_row; /* [num_tokens][N * L] out: for a rank of this node the row in its tensor, for
                      * another the token's number among those for that rank; -1: not sent there */
  int32_t* node_row; /* [num_tokens][N] out: the token's number among those for another node, or -1;
                      * -1 for this node */
  int32_t* forward_first; /* [N][L] out: where the rows of node n's rank of this rail begin in the
                           * tensor of this node's rank l */
  int32_t* forward_prefix; /* [N] out: tokens that this rank forwards for nodes 0..n */
  int32_t* num_recv_per_expert; /* [local experts] out, not aligned */
  DeepEpCounts* counts; /* out, host-readable; NULL: nobody waits */
  uint64_t ticket; /* stored into counts->ticket when it is complete */
} DeepEpInternodeNotifyArgs;

/* Dispatch: a row goes once to each other node, where a rank of the same rail puts it in place. */
typedef struct DeepEpInternodeDispatchArgs {
  uint32_t struct_size;
  int32_t num_blocks;
  void* stream;
  const DeepEpContext* context;
  const DeepEpNetwork* network;
  int32_t num_tokens;
  int32_t hidden;
  int32_t num_scales;
  int32_t num_topk;
  int32_t num_experts;
  int32_t idx_bytes;
  const void* x;
  const void* x_scales;
  int64_t scale_token_stride;
  int64_t scale_group_stride;
  const void* topk_idx;
  const float* topk_weights;
  const int32_t* recv_prefix; /* these five as notify, or a handle, has them */
  const int32_t* send_row;
  const int32_t* node_row;
  const int32_t* forward_first;
  const int32_t* forward_prefix;
  int32_t recv_capacity;
  int32_t forward_capacity; /* rows that the next two hold */
  int32_t* forward_row; /* [forward_capacity][L] out: where each forwarded token went, row in the
                         * tensor of rank l or -1; NULL: not wanted */
  int32_t* forward_token; /* [forward_capacity] out: its index on its source rank */
  int32_t fill_tail; /* as in DeepEpDispatchArgs, like the rest */
  void* recv_x;
  void* recv_x_scales;
  void* recv_topk_idx;
  float* recv_topk_weights;
  int32_t* recv_src_idx;
  DeepEpLocator at_x;
  DeepEpLocator at_x_scales;
  DeepEpLocator at_topk_idx;
  DeepEpLocator at_topk_weights;
  DeepEpLocator at_src_idx;
} DeepEpInternodeDispatchArgs;

/* Combine: each node sums its ranks' rows in FP32 and rounds once; the token's rank sums bias 0,
 * bias 1 and the nodes' sums, ascending, and rounds once more. */
typedef struct DeepEpInternodeCombineArgs {
  uint32_t struct_size;
  int32_t num_blocks;
  void* stream;
  const DeepEpContext* context;
  const DeepEpNetwork* network;
  int32_t num_tokens;
  int32_t num_recv;
  int32_t hidden;
  int32_t num_topk;
  const void* x;
  void* x_exported;
  const float* topk_weights;
  float* topk_weights_exported;
  DeepEpLocator at_x;
  DeepEpLocator at_topk_weights;
  const void* bias_0;
  const void* bias_1;
  const int32_t* send_row;
  const int32_t* node_row;
  const int32_t* forward_prefix;
  const int32_t* forward_row;
  const int32_t* forward_token;
  void* combined_x;
  float* combined_topk_weights;
} DeepEpInternodeCombineArgs;

DEEPEP_API int32_t deepep_internode_layout(const DeepEpInternodeLayoutArgs* args);
DEEPEP_API int32_t deepep_internode_notify(const DeepEpInternodeNotifyArgs* args);
DEEPEP_API int32_t deepep_internode_dispatch(const DeepEpInternodeDispatchArgs* args);
DEEPEP_API int32_t deepep_internode_combine(const DeepEpInternodeCombineArgs* args);

/* Bringing the network up; of libraries for GPUs. All but the first two are collective over the
 * ranks of the group, in which every library joins before its first operation, all with the same
 * id. The memory is symmetric, zeroed, and stays until the process ends. The device must be
 * current. */
DEEPEP_API int32_t deepep_network_id_bytes(void);
DEEPEP_API int32_t deepep_network_make_id(void* id); /* by one rank, for all */
DEEPEP_API int32_t deepep_network_join(const void* id, int32_t rank, int32_t num_ranks);
DEEPEP_API int32_t deepep_network_allocate(uint64_t bytes, void** memory);

#endif /* DEEPEP_INTERNODE_H_ */

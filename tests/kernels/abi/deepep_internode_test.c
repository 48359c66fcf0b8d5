/* The C ABI of the operations across nodes is plain C11, and its structs lie as every library and
 * runtime built so far expects; see deepep_kernel_test.c. */
#include "kernels/abi/deepep_internode.h"

#include <stddef.h>
#include <stdio.h>

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "sizeof " #type)
#define AT(type, field, bytes) \
  _Static_assert(offsetof(type, field) == (bytes), "offset of " #type "." #field)

_Static_assert(DEEPEP_ABI_VERSION == 3, "the numbers below belong to this version");

SIZE(DeepEpTransport, 40);
AT(DeepEpTransport, self, 0);
AT(DeepEpTransport, put, 8);
AT(DeepEpTransport, put_word, 16);
AT(DeepEpTransport, pause, 24);
AT(DeepEpTransport, finish, 32);

SIZE(DeepEpNetwork, 56);
AT(DeepEpNetwork, struct_size, 0);
AT(DeepEpNetwork, node, 4);
AT(DeepEpNetwork, num_nodes, 8);
AT(DeepEpNetwork, num_channels, 12);
AT(DeepEpNetwork, ranks_per_node, 16);
AT(DeepEpNetwork, local_rank, 20);
AT(DeepEpNetwork, memory, 24);
AT(DeepEpNetwork, bytes, 32);
AT(DeepEpNetwork, rail, 40);
AT(DeepEpNetwork, transport, 48);

SIZE(DeepEpInternodeLayoutArgs, 88);
AT(DeepEpInternodeLayoutArgs, struct_size, 0);
AT(DeepEpInternodeLayoutArgs, num_blocks, 4);
AT(DeepEpInternodeLayoutArgs, stream, 8);
AT(DeepEpInternodeLayoutArgs, num_nodes, 16);
AT(DeepEpInternodeLayoutArgs, ranks_per_node, 20);
AT(DeepEpInternodeLayoutArgs, num_experts, 24);
AT(DeepEpInternodeLayoutArgs, num_tokens, 28);
AT(DeepEpInternodeLayoutArgs, num_topk, 32);
AT(DeepEpInternodeLayoutArgs, idx_bytes, 36);
AT(DeepEpInternodeLayoutArgs, topk_idx, 40);
AT(DeepEpInternodeLayoutArgs, num_tokens_per_rank, 48);
AT(DeepEpInternodeLayoutArgs, num_tokens_per_node, 56);
AT(DeepEpInternodeLayoutArgs, num_tokens_per_expert, 64);
AT(DeepEpInternodeLayoutArgs, is_token_in_rank, 72);
AT(DeepEpInternodeLayoutArgs, scratch, 80);

SIZE(DeepEpInternodeNotifyArgs, 136);
AT(DeepEpInternodeNotifyArgs, struct_size, 0);
AT(DeepEpInternodeNotifyArgs, num_blocks, 4);
AT(DeepEpInternodeNotifyArgs, stream, 8);
AT(DeepEpInternodeNotifyArgs, context, 16);
AT(DeepEpInternodeNotifyArgs, network, 24);
AT(DeepEpInternodeNotifyArgs, num_tokens, 32);
AT(DeepEpInternodeNotifyArgs, num_experts, 36);
AT(DeepEpInternodeNotifyArgs, num_tokens_per_rank, 40);
AT(DeepEpInternodeNotifyArgs, num_tokens_per_node, 48);
AT(DeepEpInternodeNotifyArgs, num_tokens_per_expert, 56);
AT(DeepEpInternodeNotifyArgs, is_token_in_rank, 64);
AT(DeepEpInternodeNotifyArgs, recv_prefix, 72);
AT(DeepEpInternodeNotifyArgs, send_row, 80);
AT(DeepEpInternodeNotifyArgs, node_row, 88);
AT(DeepEpInternodeNotifyArgs, forward_first, 96);
AT(DeepEpInternodeNotifyArgs, forward_prefix, 104);
AT(DeepEpInternodeNotifyArgs, num_recv_per_expert, 112);
AT(DeepEpInternodeNotifyArgs, counts, 120);
AT(DeepEpInternodeNotifyArgs, ticket, 128);

SIZE(DeepEpInternodeDispatchArgs, 256);
AT(DeepEpInternodeDispatchArgs, struct_size, 0);
AT(DeepEpInternodeDispatchArgs, num_blocks, 4);
AT(DeepEpInternodeDispatchArgs, stream, 8);
AT(DeepEpInternodeDispatchArgs, context, 16);
AT(DeepEpInternodeDispatchArgs, network, 24);
AT(DeepEpInternodeDispatchArgs, num_tokens, 32);
AT(DeepEpInternodeDispatchArgs, hidden, 36);
AT(DeepEpInternodeDispatchArgs, num_scales, 40);
AT(DeepEpInternodeDispatchArgs, num_topk, 44);
AT(DeepEpInternodeDispatchArgs, num_experts, 48);
AT(DeepEpInternodeDispatchArgs, idx_bytes, 52);
AT(DeepEpInternodeDispatchArgs, x, 56);
AT(DeepEpInternodeDispatchArgs, x_scales, 64);
AT(DeepEpInternodeDispatchArgs, scale_token_stride, 72);
AT(DeepEpInternodeDispatchArgs, scale_group_stride, 80);
AT(DeepEpInternodeDispatchArgs, topk_idx, 88);
AT(DeepEpInternodeDispatchArgs, topk_weights, 96);
AT(DeepEpInternodeDispatchArgs, recv_prefix, 104);
AT(DeepEpInternodeDispatchArgs, send_row, 112);
AT(DeepEpInternodeDispatchArgs, node_row, 120);
AT(DeepEpInternodeDispatchArgs, forward_first, 128);
AT(DeepEpInternodeDispatchArgs, forward_prefix, 136);
AT(DeepEpInternodeDispatchArgs, recv_capacity, 144);
AT(DeepEpInternodeDispatchArgs, forward_capacity, 148);
AT(DeepEpInternodeDispatchArgs, forward_row, 152);
AT(DeepEpInternodeDispatchArgs, forward_token, 160);
AT(DeepEpInternodeDispatchArgs, fill_tail, 168);
AT(DeepEpInternodeDispatchArgs, recv_x, 176);
AT(DeepEpInternodeDispatchArgs, recv_x_scales, 184);
AT(DeepEpInternodeDispatchArgs, recv_topk_idx, 192);
AT(DeepEpInternodeDispatchArgs, recv_topk_weights, 200);
AT(DeepEpInternodeDispatchArgs, recv_src_idx, 208);
AT(DeepEpInternodeDispatchArgs, at_x, 216);
AT(DeepEpInternodeDispatchArgs, at_x_scales, 224);
AT(DeepEpInternodeDispatchArgs, at_topk_idx, 232);
AT(DeepEpInternodeDispatchArgs, at_topk_weights, 240);
AT(DeepEpInternodeDispatchArgs, at_src_idx, 248);

SIZE(DeepEpInternodeCombineArgs, 168);
AT(DeepEpInternodeCombineArgs, struct_size, 0);
AT(DeepEpInternodeCombineArgs, num_blocks, 4);
AT(DeepEpInternodeCombineArgs, stream, 8);
AT(DeepEpInternodeCombineArgs, context, 16);
AT(DeepEpInternodeCombineArgs, network, 24);
AT(DeepEpInternodeCombineArgs, num_tokens, 32);
AT(DeepEpInternodeCombineArgs, num_recv, 36);
AT(DeepEpInternodeCombineArgs, hidden, 40);
AT(DeepEpInternodeCombineArgs, num_topk, 44);
AT(DeepEpInternodeCombineArgs, x, 48);
AT(DeepEpInternodeCombineArgs, x_exported, 56);
AT(DeepEpInternodeCombineArgs, topk_weights, 64);
AT(DeepEpInternodeCombineArgs, topk_weights_exported, 72);
AT(DeepEpInternodeCombineArgs, at_x, 80);
AT(DeepEpInternodeCombineArgs, at_topk_weights, 88);
AT(DeepEpInternodeCombineArgs, bias_0, 96);
AT(DeepEpInternodeCombineArgs, bias_1, 104);
AT(DeepEpInternodeCombineArgs, send_row, 112);
AT(DeepEpInternodeCombineArgs, node_row, 120);
AT(DeepEpInternodeCombineArgs, forward_prefix, 128);
AT(DeepEpInternodeCombineArgs, forward_row, 136);
AT(DeepEpInternodeCombineArgs, forward_token, 144);
AT(DeepEpInternodeCombineArgs, combined_x, 152);
AT(DeepEpInternodeCombineArgs, combined_topk_weights, 160);

/* Another signature than the header's would not compile. */
int32_t deepep_internode_layout(const DeepEpInternodeLayoutArgs* args);
int32_t deepep_internode_notify(const DeepEpInternodeNotifyArgs* args);
int32_t deepep_internode_dispatch(const DeepEpInternodeDispatchArgs* args);
int32_t deepep_internode_combine(const DeepEpInternodeCombineArgs* args);
int32_t deepep_network_id_bytes(void);
int32_t deepep_network_make_id(void* id);
int32_t deepep_network_join(const void* id, int32_t rank, int32_t num_ranks);
int32_t deepep_network_allocate(uint64_t bytes, void** memory);

int main(void) {
  puts("kernels/abi/deepep_internode.h: C11, and all sizes and offsets are as they were");
  return 0;
}

/* The C ABI header is plain C11, and its structs lie as every library and runtime built so far
 * expects. A number here changes only together with DEEPEP_ABI_VERSION. 64-bit targets. */
#include "kernels/abi/deepep_kernel.h"

#include <stddef.h>
#include <stdio.h>

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "sizeof " #type)
#define AT(type, field, bytes) \
  _Static_assert(offsetof(type, field) == (bytes), "offset of " #type "." #field)

_Static_assert(DEEPEP_ABI_VERSION == 3, "the numbers below belong to this version");
_Static_assert(sizeof(void*) == 8, "pointers");
SIZE(DeepEpLocator, 8);
_Static_assert(sizeof(enum DeepEpStatus) == sizeof(int32_t), "functions return a status as int32_t");

SIZE(DeepEpVariantInfo, 104);
AT(DeepEpVariantInfo, struct_size, 0);
AT(DeepEpVariantInfo, abi_version, 4);
AT(DeepEpVariantInfo, name, 8);
AT(DeepEpVariantInfo, topology, 16);
AT(DeepEpVariantInfo, arch, 24);
AT(DeepEpVariantInfo, dtype, 32);
AT(DeepEpVariantInfo, hidden, 40);
AT(DeepEpVariantInfo, num_ranks, 44);
AT(DeepEpVariantInfo, num_nodes, 48);
AT(DeepEpVariantInfo, context_size, 52);
AT(DeepEpVariantInfo, layout_args_size, 56);
AT(DeepEpVariantInfo, notify_args_size, 60);
AT(DeepEpVariantInfo, dispatch_args_size, 64);
AT(DeepEpVariantInfo, combine_args_size, 68);
AT(DeepEpVariantInfo, low_latency_dispatch_args_size, 72);
AT(DeepEpVariantInfo, low_latency_combine_args_size, 76);
AT(DeepEpVariantInfo, internode_layout_args_size, 80);
AT(DeepEpVariantInfo, internode_notify_args_size, 84);
AT(DeepEpVariantInfo, internode_dispatch_args_size, 88);
AT(DeepEpVariantInfo, internode_combine_args_size, 92);
AT(DeepEpVariantInfo, network_size, 96);
AT(DeepEpVariantInfo, control_bytes, 100);

SIZE(DeepEpFault, 64);
AT(DeepEpFault, code, 0);
AT(DeepEpFault, claimed, 8);
AT(DeepEpFault, op, 12);
AT(DeepEpFault, phase, 16);
AT(DeepEpFault, rank, 20);
AT(DeepEpFault, epoch, 24);
AT(DeepEpFault, peers, 32);
AT(DeepEpFault, nodes, 40);
AT(DeepEpFault, expected, 48);
AT(DeepEpFault, seen, 56);

SIZE(DeepEpCounts, 4120);
AT(DeepEpCounts, ticket, 0);
AT(DeepEpCounts, num_recv_tokens, 8);
AT(DeepEpCounts, num_forward_tokens, 12);
AT(DeepEpCounts, num_local_experts, 16);
AT(DeepEpCounts, reserved, 20);
AT(DeepEpCounts, per_expert, 24);

SIZE(DeepEpContext, 80);
AT(DeepEpContext, struct_size, 0);
AT(DeepEpContext, rank, 4);
AT(DeepEpContext, num_ranks, 8);
AT(DeepEpContext, reserved, 12);
AT(DeepEpContext, control, 16);
AT(DeepEpContext, segments, 24);
AT(DeepEpContext, segment_cache, 32);
AT(DeepEpContext, fault, 40);
AT(DeepEpContext, timeout_ns, 48);
AT(DeepEpContext, workspaces, 56);
AT(DeepEpContext, workspace_bytes, 64);
AT(DeepEpContext, is_interrupted, 72);

SIZE(DeepEpLayoutArgs, 80);
AT(DeepEpLayoutArgs, struct_size, 0);
AT(DeepEpLayoutArgs, num_blocks, 4);
AT(DeepEpLayoutArgs, stream, 8);
AT(DeepEpLayoutArgs, num_ranks, 16);
AT(DeepEpLayoutArgs, num_experts, 20);
AT(DeepEpLayoutArgs, num_tokens, 24);
AT(DeepEpLayoutArgs, num_topk, 28);
AT(DeepEpLayoutArgs, idx_bytes, 32);
AT(DeepEpLayoutArgs, topk_idx, 40);
AT(DeepEpLayoutArgs, num_tokens_per_rank, 48);
AT(DeepEpLayoutArgs, num_tokens_per_expert, 56);
AT(DeepEpLayoutArgs, is_token_in_rank, 64);
AT(DeepEpLayoutArgs, scratch, 72);

SIZE(DeepEpNotifyArgs, 96);
AT(DeepEpNotifyArgs, struct_size, 0);
AT(DeepEpNotifyArgs, num_blocks, 4);
AT(DeepEpNotifyArgs, stream, 8);
AT(DeepEpNotifyArgs, context, 16);
AT(DeepEpNotifyArgs, num_tokens, 24);
AT(DeepEpNotifyArgs, num_experts, 28);
AT(DeepEpNotifyArgs, num_tokens_per_rank, 32);
AT(DeepEpNotifyArgs, num_tokens_per_expert, 40);
AT(DeepEpNotifyArgs, is_token_in_rank, 48);
AT(DeepEpNotifyArgs, rank_prefix, 56);
AT(DeepEpNotifyArgs, send_row, 64);
AT(DeepEpNotifyArgs, num_recv_per_expert, 72);
AT(DeepEpNotifyArgs, counts, 80);
AT(DeepEpNotifyArgs, ticket, 88);

SIZE(DeepEpDispatchArgs, 200);
AT(DeepEpDispatchArgs, struct_size, 0);
AT(DeepEpDispatchArgs, num_blocks, 4);
AT(DeepEpDispatchArgs, stream, 8);
AT(DeepEpDispatchArgs, context, 16);
AT(DeepEpDispatchArgs, num_tokens, 24);
AT(DeepEpDispatchArgs, hidden, 28);
AT(DeepEpDispatchArgs, num_scales, 32);
AT(DeepEpDispatchArgs, num_topk, 36);
AT(DeepEpDispatchArgs, num_experts, 40);
AT(DeepEpDispatchArgs, idx_bytes, 44);
AT(DeepEpDispatchArgs, x, 48);
AT(DeepEpDispatchArgs, x_scales, 56);
AT(DeepEpDispatchArgs, scale_token_stride, 64);
AT(DeepEpDispatchArgs, scale_group_stride, 72);
AT(DeepEpDispatchArgs, topk_idx, 80);
AT(DeepEpDispatchArgs, topk_weights, 88);
AT(DeepEpDispatchArgs, send_row, 96);
AT(DeepEpDispatchArgs, rank_prefix, 104);
AT(DeepEpDispatchArgs, recv_capacity, 112);
AT(DeepEpDispatchArgs, fill_tail, 116);
AT(DeepEpDispatchArgs, recv_x, 120);
AT(DeepEpDispatchArgs, recv_x_scales, 128);
AT(DeepEpDispatchArgs, recv_topk_idx, 136);
AT(DeepEpDispatchArgs, recv_topk_weights, 144);
AT(DeepEpDispatchArgs, recv_src_idx, 152);
AT(DeepEpDispatchArgs, at_x, 160);
AT(DeepEpDispatchArgs, at_x_scales, 168);
AT(DeepEpDispatchArgs, at_topk_idx, 176);
AT(DeepEpDispatchArgs, at_topk_weights, 184);
AT(DeepEpDispatchArgs, at_src_idx, 192);

SIZE(DeepEpCombineArgs, 128);
AT(DeepEpCombineArgs, struct_size, 0);
AT(DeepEpCombineArgs, num_blocks, 4);
AT(DeepEpCombineArgs, stream, 8);
AT(DeepEpCombineArgs, context, 16);
AT(DeepEpCombineArgs, num_tokens, 24);
AT(DeepEpCombineArgs, num_recv, 28);
AT(DeepEpCombineArgs, hidden, 32);
AT(DeepEpCombineArgs, num_topk, 36);
AT(DeepEpCombineArgs, x, 40);
AT(DeepEpCombineArgs, x_exported, 48);
AT(DeepEpCombineArgs, topk_weights, 56);
AT(DeepEpCombineArgs, topk_weights_exported, 64);
AT(DeepEpCombineArgs, at_x, 72);
AT(DeepEpCombineArgs, at_topk_weights, 80);
AT(DeepEpCombineArgs, bias_0, 88);
AT(DeepEpCombineArgs, bias_1, 96);
AT(DeepEpCombineArgs, send_row, 104);
AT(DeepEpCombineArgs, combined_x, 112);
AT(DeepEpCombineArgs, combined_topk_weights, 120);

/* A segment number of 16 bits must name every segment, a mask of 64 bits every rank. */
_Static_assert(DEEPEP_MAX_SEGMENTS <= 1 << 16, "DeepEpLocator");
_Static_assert(DEEPEP_MAX_RANKS <= 64, "DeepEpFault.peers");

/* The functions' types; declared again with another one, this file would not compile. */
const DeepEpVariantInfo* deepep_variant(void);
const char* deepep_last_error(void);
int32_t deepep_layout(const DeepEpLayoutArgs* args);
int32_t deepep_notify(const DeepEpNotifyArgs* args);
int32_t deepep_dispatch(const DeepEpDispatchArgs* args);
int32_t deepep_combine(const DeepEpCombineArgs* args);

int main(void) {
  puts("kernels/abi/deepep_kernel.h: C11, and all sizes and offsets are as they were");
  return 0;
}

/* The C ABI of the low-latency operations is plain C11, and its structs lie as every library and
 * runtime built so far expects; see deepep_kernel_test.c. */
#include "kernels/abi/deepep_lowlatency.h"

#include <stddef.h>
#include <stdio.h>

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "sizeof " #type)
#define AT(type, field, bytes) \
  _Static_assert(offsetof(type, field) == (bytes), "offset of " #type "." #field)

_Static_assert(DEEPEP_ABI_VERSION == 3, "the numbers below belong to this version");

SIZE(DeepEpLowLatencyDispatchArgs, 192);
AT(DeepEpLowLatencyDispatchArgs, struct_size, 0);
AT(DeepEpLowLatencyDispatchArgs, num_blocks, 4);
AT(DeepEpLowLatencyDispatchArgs, stream, 8);
AT(DeepEpLowLatencyDispatchArgs, context, 16);
AT(DeepEpLowLatencyDispatchArgs, phases, 24);
AT(DeepEpLowLatencyDispatchArgs, direct, 28);
AT(DeepEpLowLatencyDispatchArgs, cast, 32);
AT(DeepEpLowLatencyDispatchArgs, num_tokens, 36);
AT(DeepEpLowLatencyDispatchArgs, max_tokens, 40);
AT(DeepEpLowLatencyDispatchArgs, hidden, 44);
AT(DeepEpLowLatencyDispatchArgs, num_scales, 48);
AT(DeepEpLowLatencyDispatchArgs, num_topk, 52);
AT(DeepEpLowLatencyDispatchArgs, num_experts, 56);
AT(DeepEpLowLatencyDispatchArgs, idx_bytes, 60);
AT(DeepEpLowLatencyDispatchArgs, x, 64);
AT(DeepEpLowLatencyDispatchArgs, x_scales, 72);
AT(DeepEpLowLatencyDispatchArgs, scale_token_stride, 80);
AT(DeepEpLowLatencyDispatchArgs, scale_group_stride, 88);
AT(DeepEpLowLatencyDispatchArgs, topk_idx, 96);
AT(DeepEpLowLatencyDispatchArgs, mask, 104);
AT(DeepEpLowLatencyDispatchArgs, send_index, 112);
AT(DeepEpLowLatencyDispatchArgs, send_counts, 120);
AT(DeepEpLowLatencyDispatchArgs, recv_x, 128);
AT(DeepEpLowLatencyDispatchArgs, recv_scales, 136);
AT(DeepEpLowLatencyDispatchArgs, recv_source, 144);
AT(DeepEpLowLatencyDispatchArgs, recv_count, 152);
AT(DeepEpLowLatencyDispatchArgs, layout_range, 160);
AT(DeepEpLowLatencyDispatchArgs, recv_stats, 168);
AT(DeepEpLowLatencyDispatchArgs, wait_stats, 176);
AT(DeepEpLowLatencyDispatchArgs, at, 184);

SIZE(DeepEpLowLatencyCombineArgs, 136);
AT(DeepEpLowLatencyCombineArgs, struct_size, 0);
AT(DeepEpLowLatencyCombineArgs, num_blocks, 4);
AT(DeepEpLowLatencyCombineArgs, stream, 8);
AT(DeepEpLowLatencyCombineArgs, context, 16);
AT(DeepEpLowLatencyCombineArgs, phases, 24);
AT(DeepEpLowLatencyCombineArgs, use_logfmt, 28);
AT(DeepEpLowLatencyCombineArgs, num_tokens, 32);
AT(DeepEpLowLatencyCombineArgs, max_tokens, 36);
AT(DeepEpLowLatencyCombineArgs, hidden, 40);
AT(DeepEpLowLatencyCombineArgs, num_topk, 44);
AT(DeepEpLowLatencyCombineArgs, num_experts, 48);
AT(DeepEpLowLatencyCombineArgs, idx_bytes, 52);
AT(DeepEpLowLatencyCombineArgs, x, 56);
AT(DeepEpLowLatencyCombineArgs, at_x, 64);
AT(DeepEpLowLatencyCombineArgs, topk_idx, 72);
AT(DeepEpLowLatencyCombineArgs, topk_weights, 80);
AT(DeepEpLowLatencyCombineArgs, send_index, 88);
AT(DeepEpLowLatencyCombineArgs, recv_source, 96);
AT(DeepEpLowLatencyCombineArgs, layout_range, 104);
AT(DeepEpLowLatencyCombineArgs, mask, 112);
AT(DeepEpLowLatencyCombineArgs, out, 120);
AT(DeepEpLowLatencyCombineArgs, wait_stats, 128);

/* 24 bits of a cell tell the first row of a source, or that rows were sent. */
_Static_assert(DEEPEP_MAX_LOW_LATENCY_ROWS < (1 << 24) - 1, "kernels/device/lowlatency/cells.h");

/* The functions' types; declared again with another one, this file would not compile. */
int32_t deepep_low_latency_dispatch(const DeepEpLowLatencyDispatchArgs* args);
int32_t deepep_low_latency_combine(const DeepEpLowLatencyCombineArgs* args);

int main(void) {
  puts("kernels/abi/deepep_lowlatency.h: C11, and all sizes and offsets are as they were");
  return 0;
}

// How a rank's low-latency workspace lies in memory: cells first, then two halves that consecutive
// operations use in turn. Read by kernels and, for its sizes, by kernels/runtime.
//
// The cells' places depend on the number of ranks alone and the halves' on the workspace's size, so
// operations of any shape may follow each other without a clean-up. What lies in a half depends on
// the operation: messages (dispatch), or a row for each selection (combine).
#ifndef KERNELS_DEVICE_LOWLATENCY_WORKSPACE_H_
#define KERNELS_DEVICE_LOWLATENCY_WORKSPACE_H_

#include <cstdint>

#include "kernels/abi/deepep_lowlatency.h"

#ifndef DEEPEP_ANYWHERE  // read by the runtime, which has no architecture
#define DEEPEP_ANYWHERE inline
#endif

namespace deepep {

constexpr int kHeadCells = 6;  // what a source says about itself, see cells.h
constexpr int64_t kPartAlignment = 256;  // bytes
constexpr int64_t kMessageHeadBytes = 16;  // the row's source, and padding

DEEPEP_ANYWHERE int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

// Bytes of one row on its way: head, row, scales.
DEEPEP_ANYWHERE int64_t message_bytes(int64_t row_bytes, int64_t num_scales) {
  return kMessageHeadBytes + row_bytes + round_up(4 * num_scales, 16);
}

// Bytes of one row of the result on its way back: in BF16, or the parts of it that LogFMT writes,
// with two BF16 numbers for each group in front.
DEEPEP_ANYWHERE int64_t slot_bytes(int64_t hidden, bool use_logfmt) {
  const int64_t groups = (hidden + DEEPEP_FP8_GROUP - 1) / DEEPEP_FP8_GROUP;
  return 2 * hidden + (use_logfmt ? round_up(4 * groups, 16) : 0);
}

// Where the cells of each kind begin, in bytes; two sets, for even and odd operations.
struct CellLayout {
  int64_t heads, counts, ready, total;

  DEEPEP_ANYWHERE explicit CellLayout(int64_t num_ranks) {
    heads = 0;  // [2][source][kHeadCells]
    counts = heads + 2 * num_ranks * kHeadCells * 8;  // [2][source][expert]
    ready = counts + 2 * num_ranks * DEEPEP_MAX_LOW_LATENCY_EXPERTS * 8;  // [2][expert]
    total = round_up(ready + 2 * DEEPEP_MAX_LOW_LATENCY_EXPERTS * 8, kPartAlignment);
  }
};

DEEPEP_ANYWHERE int64_t half_bytes(int64_t num_ranks, int64_t workspace_bytes) {
  const int64_t left = workspace_bytes - CellLayout(num_ranks).total;
  return left < 0 ? -1 : left / 2 / kPartAlignment * kPartAlignment;
}

// What a half must hold, in bytes. `experts` are those of the rank that has most.
DEEPEP_ANYWHERE int64_t messages_bytes(int64_t experts, int64_t num_ranks, int64_t max_tokens,
                                       int64_t row_bytes, int64_t num_scales) {
  return experts * num_ranks * max_tokens * message_bytes(row_bytes, num_scales);
}
DEEPEP_ANYWHERE int64_t slots_bytes(int64_t max_tokens, int64_t num_topk, int64_t hidden,
                                    bool use_logfmt) {
  return round_up(max_tokens * num_topk * slot_bytes(hidden, use_logfmt), kPartAlignment);
}
DEEPEP_ANYWHERE int64_t most_choices(int64_t num_experts) {
  return num_experts < DEEPEP_MAX_TOPK ? num_experts : DEEPEP_MAX_TOPK;
}

// The workspace that serves every low-latency call of these shapes; what
// Buffer.get_low_latency_rdma_size_hint returns.
DEEPEP_ANYWHERE int64_t workspace_hint(int64_t max_tokens, int64_t hidden, int64_t num_ranks,
                                       int64_t num_experts) {
  const int64_t experts = (num_experts + num_ranks - 1) / num_ranks;
  const int64_t groups = (hidden + DEEPEP_FP8_GROUP - 1) / DEEPEP_FP8_GROUP;
  const int64_t bf16 = messages_bytes(experts, num_ranks, max_tokens, 2 * hidden, 0);
  const int64_t fp8 = messages_bytes(experts, num_ranks, max_tokens, hidden, groups);
  const int64_t sent = bf16 > fp8 ? bf16 : fp8;
  const int64_t back = slots_bytes(max_tokens, most_choices(num_experts), hidden, true);
  const int64_t half = round_up(sent > back ? sent : back, kPartAlignment);
  return CellLayout(num_ranks).total + 2 * half;
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_LOWLATENCY_WORKSPACE_H_

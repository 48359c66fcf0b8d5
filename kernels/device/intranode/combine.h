// Combine inside one memory domain, as a pull: each rank reads its tokens' rows from the ranks that
// hold them, sums in FP32 in a fixed order, rounds once and writes once.
#ifndef KERNELS_DEVICE_INTRANODE_COMBINE_H_
#define KERNELS_DEVICE_INTRANODE_COMBINE_H_

#include "kernels/device/intranode/handshake.h"

namespace deepep {

constexpr int kCombineElemBytes = 2;  // BF16, whatever dispatch carried

// The parts of a source, in the order of Entry::at.
enum SourcePart { kSourceX, kSourceTopkWeights };

// Where a token's rows lie and where its sum goes; what arch::gather_rows asks.
struct GatherPlan {
  const Operation& op;
  const DeepEpCombineArgs& args;
  int num_ranks;
  int64_t row_bytes;

  DEEPEP_DEVICE const void* bias(int64_t token, int index) const {
    const void* bias = index == 0 ? args.bias_0 : args.bias_1;
    return bias == nullptr ? nullptr : static_cast<const char*>(bias) + token * row_bytes;
  }
  DEEPEP_DEVICE const void* row(int64_t token, int rank) const {
    const int32_t row = args.send_row[token * num_ranks + rank];
    if (row < 0) return nullptr;
    return op.locate(rank, op.own()->entries[op.op()][rank].at[kSourceX]) + row * row_bytes;
  }
  DEEPEP_DEVICE void* out(int64_t token) const {
    return static_cast<char*>(args.combined_x) + token * row_bytes;
  }
};

// Copies what does not lie in exported memory to where the peers can read it.
DEEPEP_DEVICE void stage(const void* from, void* to, int64_t bytes) {
  if (from == to || bytes == 0) return;
  const auto grid = arch::this_grid();
  arch::copy_slice(grid, from, to, bytes);
}

// The weights' sum over ranks, ascending, as for the rows.
DEEPEP_DEVICE void gather_weights(const Operation& op, const DeepEpCombineArgs& args,
                                  int num_ranks) {
  const auto grid = arch::this_grid();
  const int64_t count = static_cast<int64_t>(args.num_tokens) * args.num_topk;
  for (int64_t i = grid.thread(); i < count; i += grid.num_threads()) {
    const int64_t token = i / args.num_topk, k = i % args.num_topk;
    float sum = 0.0f;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const int32_t row = args.send_row[token * num_ranks + rank];
      if (row < 0) continue;
      const char* weights =
          op.locate(rank, op.own()->entries[op.op()][rank].at[kSourceTopkWeights]);
      sum += reinterpret_cast<const float*>(weights)[static_cast<int64_t>(row) * args.num_topk + k];
    }
    args.combined_topk_weights[i] = sum;
  }
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTRANODE_COMBINE_H_

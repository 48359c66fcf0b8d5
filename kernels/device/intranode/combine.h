// Combine inside one memory domain, as a pull: each rank reads its tokens' rows from the ranks that
// hold them, sums in FP32 in a fixed order, rounds once and writes once.
#ifndef KERNELS_DEVICE_INTRANODE_COMBINE_H_
#define KERNELS_DEVICE_INTRANODE_COMBINE_H_

#include "kernels/device/intranode/handshake.h"

namespace deepep {

constexpr int kCombineElemBytes = 2;  // BF16, whatever dispatch carried

// The parts of a source, in the order of Entry::at.
enum SourcePart { kSourceX, kSourceTopkWeights };

// A peer's rows as mapped here.
struct Source {
  const char* x;
  const float* topk_weights;
};

// Looks the peers' published addresses up once for the whole block.
template <class Team>
DEEPEP_DEVICE void find_sources(const Operation& op, Team block, int num_ranks, Source* sources) {
  for (int peer = block.lane(); peer < num_ranks; peer += block.size()) {
    const Entry& entry = op.own()->entries[op.op()][peer];
    const auto find = [&](SourcePart part) -> const char* {
      const DeepEpLocator at = entry.at[part];
      return at == DEEPEP_NO_LOCATOR ? nullptr : op.locate(peer, at);
    };
    sources[peer].x = find(kSourceX);
    sources[peer].topk_weights = reinterpret_cast<const float*>(find(kSourceTopkWeights));
  }
  block.sync();
}

// Where a token's rows lie and where its sum goes; what arch::gather_rows asks.
struct GatherPlan {
  static constexpr bool kWeighted = false;
  const DeepEpCombineArgs& args;
  const Source* sources;
  int num_ranks;
  int64_t row_bytes;

  DEEPEP_DEVICE const void* bias(int64_t token, int index) const {
    const void* bias = index == 0 ? args.bias_0 : args.bias_1;
    return bias == nullptr ? nullptr : static_cast<const char*>(bias) + token * row_bytes;
  }
  DEEPEP_DEVICE const void* row(int64_t token, int rank) const {
    const int64_t row = args.send_row[token * num_ranks + rank];
    return row < 0 ? nullptr : sources[rank].x + row * row_bytes;
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
DEEPEP_DEVICE void gather_weights(const DeepEpCombineArgs& args, const Source* sources,
                                  int num_ranks) {
  const auto grid = arch::this_grid();
  const int64_t count = static_cast<int64_t>(args.num_tokens) * args.num_topk;
  for (int64_t i = grid.thread(); i < count; i += grid.num_threads()) {
    const int64_t token = i / args.num_topk, k = i % args.num_topk;
    float sum = 0.0f;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const int64_t row = args.send_row[token * num_ranks + rank];
      if (row >= 0) sum += sources[rank].topk_weights[row * args.num_topk + k];
    }
    args.combined_topk_weights[i] = sum;
  }
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_INTRANODE_COMBINE_H_

// Sum of a token's rows by plain 16-byte loads, all rows of a word in flight at once.
#ifndef KERNELS_DEVICE_ARCH_GATHER_CUH_
#define KERNELS_DEVICE_ARCH_GATHER_CUH_

#include <cuda_bf16.h>

#include "kernels/device/arch/cuda.cuh"

namespace deepep::arch {

// Eight BF16 values, summed in FP32.
struct Sum8 {
  float value[8] = {};

  DEEPEP_DEVICE void add(const uint4& word) {
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&word);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __bfloat1622float2(pairs[i]);
      value[2 * i] += pair.x;
      value[2 * i + 1] += pair.y;
    }
  }
  DEEPEP_DEVICE uint4 round() const {
    uint4 word;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&word);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(value[2 * i], value[2 * i + 1]);
    return word;
  }
};

// The rows of one token, in the order of the sum: lane l knows bias l, then the row of rank l and
// of rank l + 32.
struct Sources {
  const uint4* bias;
  const uint4* row[2];
  unsigned has_bias, has_row[2];

  template <class Plan>
  DEEPEP_DEVICE Sources(Team team, const Plan& plan, int64_t token, int num_ranks) {
    const int lane = team.lane();
    bias = lane < 2 ? static_cast<const uint4*>(plan.bias(token, lane)) : nullptr;
    has_bias = __ballot_sync(kAllLanes, bias != nullptr);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int rank = lane + half * kWarpSize;
      row[half] = rank < num_ranks ? static_cast<const uint4*>(plan.row(token, rank)) : nullptr;
      has_row[half] = __ballot_sync(kAllLanes, row[half] != nullptr);
    }
  }
};

DEEPEP_DEVICE const uint4* from_lane(const uint4* pointer, int lane) {
  return reinterpret_cast<const uint4*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

// Adds word i of the rows of `left`, kBatch of them in flight at once. By all lanes.
template <int kBatch>
DEEPEP_DEVICE void add_rows(Sum8& sum, const uint4* pointer, unsigned left, int i, int count) {
  while (left != 0) {
    uint4 v[kBatch];
    int n = 0;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (left == 0) break;
      const uint4* row = from_lane(pointer, __ffs(static_cast<int>(left)) - 1);
      left &= left - 1;
      n = k + 1;
      if (i < count) v[k] = load_once(row + i);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (k < n && i < count) sum.add(v[k]);
    }
  }
}

// The sum of at most kMax rows, no bias: their addresses stay in registers.
template <int kMax>
DEEPEP_DEVICE void gather_few(Team team, const Sources& sources, uint4* out, int count) {
  const uint4* rows[kMax];
  const int n = __popc(sources.has_row[0]);
  unsigned left = sources.has_row[0];
#pragma unroll
  for (int k = 0; k < kMax; ++k) {
    rows[k] = from_lane(sources.row[0], left != 0 ? __ffs(static_cast<int>(left)) - 1 : 0);
    left &= left - 1;
  }
#pragma unroll 1
  for (int i = team.lane(); i < count; i += kWarpSize) {
    uint4 v[kMax];
#pragma unroll
    for (int k = 0; k < kMax; ++k) {
      if (k < n) v[k] = load_once(rows[k] + i);
    }
    Sum8 sum;
#pragma unroll
    for (int k = 0; k < kMax; ++k) {
      if (k < n) sum.add(v[k]);
    }
    store_once(out + i, sum.round());
  }
}

template <int kNumRanks, class Plan>
DEEPEP_DEVICE void gather_row(Team team, const Plan& plan, int64_t token, int num_ranks,
                              int hidden) {
  constexpr int kFew = kNumRanks != 0 && kNumRanks < 8 ? kNumRanks : 8;
  const Sources sources(team, plan, token, num_ranks);
  auto* out = static_cast<uint4*>(plan.out(token));
  const int count = hidden / 8;
  if ((sources.has_bias | sources.has_row[1]) == 0 && __popc(sources.has_row[0]) <= kFew) {
    gather_few<kFew>(team, sources, out, count);
    return;
  }
#pragma unroll 1
  for (int base = 0; base < count; base += kWarpSize) {
    const int i = base + team.lane();
    Sum8 sum;
    add_rows<2>(sum, sources.bias, sources.has_bias, i, count);
    add_rows<4>(sum, sources.row[0], sources.has_row[0], i, count);
    add_rows<4>(sum, sources.row[1], sources.has_row[1], i, count);
    if (i < count) store_once(out + i, sum.round());
  }
}

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_GATHER_CUH_

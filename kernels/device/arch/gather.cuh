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

// Adds the rows of `left` to the sums of this lane's words. kBatch rows are in flight at once.
template <int kBatch, int kWords>
DEEPEP_DEVICE void add_rows(Sum8 (&sums)[kWords], const uint4* pointer, unsigned left, int first,
                            int count) {
  while (left != 0) {
    const uint4* rows[kBatch];
    int n = 0;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (left == 0) break;
      rows[k] = from_lane(pointer, __ffs(static_cast<int>(left)) - 1);
      left &= left - 1;
      n = k + 1;
    }
    uint4 v[kBatch][kWords];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int i = first + w * kWarpSize;
        if (k < n && i < count) v[k][w] = load_once(rows[k] + i);
      }
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (k < n && first + w * kWarpSize < count) sums[w].add(v[k][w]);
      }
    }
  }
}

template <int kNumRanks, class Plan>
DEEPEP_DEVICE void gather_row(Team team, const Plan& plan, int64_t token, int num_ranks,
                              int hidden) {
  constexpr int kBatch = kNumRanks != 0 && kNumRanks < 8 ? kNumRanks : 8;
  constexpr int kWords = kBatch <= 4 ? 2 : 1;
  const Sources sources(team, plan, token, num_ranks);
  auto* out = static_cast<uint4*>(plan.out(token));
  const int count = hidden / 8;
  for (int base = 0; base < count; base += kWords * kWarpSize) {
    const int first = base + team.lane();
    Sum8 sums[kWords];
    if (sources.has_bias != 0) add_rows<2>(sums, sources.bias, sources.has_bias, first, count);
    add_rows<kBatch>(sums, sources.row[0], sources.has_row[0], first, count);
    if (kNumRanks == 0 || kNumRanks > kWarpSize) {
      add_rows<kBatch>(sums, sources.row[1], sources.has_row[1], first, count);
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (first + w * kWarpSize < count) store_once(out + first + w * kWarpSize, sums[w].round());
    }
  }
}

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_GATHER_CUH_

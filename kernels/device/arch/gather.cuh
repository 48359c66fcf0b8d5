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
  // A product is rounded before it is added, as on every architecture.
  DEEPEP_DEVICE void add(const uint4& word, float weight) {
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&word);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __bfloat1622float2(pairs[i]);
      value[2 * i] = __fadd_rn(value[2 * i], __fmul_rn(pair.x, weight));
      value[2 * i + 1] = __fadd_rn(value[2 * i + 1], __fmul_rn(pair.y, weight));
    }
  }
  template <bool kWeighted>
  DEEPEP_DEVICE void add_row(const uint4& word, float weight) {
    if constexpr (kWeighted) {
      add(word, weight);
    } else {
      add(word);
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

// The rows of one token, in the order of the sum: lane l knows bias l, then row l and row l + 32.
struct Sources {
  const uint4* bias;
  const uint4* row[2];
  float weight = 1.0f;  // of row l; where rows have weights there are no more than lanes
  unsigned has_bias, has_row[2];

  template <class Plan>
  DEEPEP_DEVICE Sources(Team team, const Plan& plan, int64_t token, int num_rows) {
    const int lane = team.lane();
    bias = lane < 2 ? static_cast<const uint4*>(plan.bias(token, lane)) : nullptr;
    has_bias = __ballot_sync(kAllLanes, bias != nullptr);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = lane + half * kWarpSize;
      row[half] = i < num_rows ? static_cast<const uint4*>(plan.row(token, i)) : nullptr;
      has_row[half] = __ballot_sync(kAllLanes, row[half] != nullptr);
    }
    if constexpr (Plan::kWeighted) {
      if (lane < num_rows) weight = plan.weight(token, lane);
    }
  }
};

DEEPEP_DEVICE const uint4* from_lane(const uint4* pointer, int lane) {
  return reinterpret_cast<const uint4*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

// Adds word i of the rows of `left`, kBatch of them in flight at once. By all lanes.
template <int kBatch, bool kWeighted>
DEEPEP_DEVICE void add_rows(Sum8& sum, const uint4* pointer, float weight, unsigned left, int i,
                            int count) {
  while (left != 0) {
    uint4 v[kBatch];
    float weights[kBatch];
    int n = 0;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (left == 0) break;
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const uint4* row = from_lane(pointer, lane);
      if constexpr (kWeighted) weights[k] = __shfl_sync(kAllLanes, weight, lane);
      left &= left - 1;
      n = k + 1;
      if (i < count) v[k] = load_once(row + i);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (k < n && i < count) sum.add_row<kWeighted>(v[k], kWeighted ? weights[k] : 1.0f);
    }
  }
}

// How warps share tokens: each one gets some of the equal steps that a row is long. With few tokens
// several warps share a row, or most would have nothing to do.
struct RowShare {
  int parts;  // warps that share a token
  int part;   // this one
  int first, stride;  // tokens

  // One warp has a row for itself.
  DEEPEP_DEVICE RowShare() : parts(1), part(0), first(0), stride(1) {}
  // The division that is done first; by all lanes, each of which tries one number of parts. To find
  // a token's rows takes about as long as a step.
  DEEPEP_DEVICE RowShare(Grid grid, Team team, int num_tokens, int num_steps) {
    const int num_teams = grid.num_teams();
    const int mine = team.lane() + 1;
    uint32_t cost = ~0u;
    if (mine <= num_steps && mine <= num_teams) {
      const int teams = num_teams / mine;
      const int rounds = (num_tokens + teams - 1) / teams, steps = (num_steps + mine - 1) / mine;
      const uint32_t time = static_cast<uint32_t>(rounds) * static_cast<uint32_t>(steps + 1);
      cost = (time < kMostTime ? time : kMostTime) * kWarpSize + team.lane();
    }
    parts = static_cast<int>(__reduce_min_sync(kAllLanes, cost) % kWarpSize) + 1;
    part = grid.team() % parts;
    stride = num_teams / parts;
    first = grid.team() / parts;
    if (first >= stride) first = num_tokens;  // left over
  }

 private:
  static constexpr uint32_t kMostTime = (1u << 26) - 1;
};

// The sum of kRows rows, no bias: their addresses stay in registers, and so many words of each are
// in flight at once that few rows keep the memory as busy as many.
template <int kRows, bool kWeighted>
DEEPEP_DEVICE void gather_exactly(Team team, const RowShare& share, const Sources& sources,
                                  uint4* out, int count) {
  constexpr int kWords = kRows <= 2 ? 4 : kRows <= 5 ? 2 : 1;
  constexpr int kSlots = kRows > 0 ? kRows : 1;
  const uint4* rows[kSlots];
  float weights[kSlots];
  unsigned left = sources.has_row[0];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    rows[k] = from_lane(sources.row[0], lane);
    if constexpr (kWeighted) weights[k] = __shfl_sync(kAllLanes, sources.weight, lane);
    left &= left - 1;
  }
  const int step = share.parts * kWords * kWarpSize;
#pragma unroll 1
  for (int i = share.part * kWords * kWarpSize + team.lane(); i < count; i += step) {
    uint4 v[kWords * kSlots] = {};
#pragma unroll
    for (int j = 0; j < kWords * kRows; ++j) {
      const int at = i + j / kSlots * kWarpSize;
      if (at < count) v[j] = load_once(rows[j % kSlots] + at);
    }
    Sum8 sum[kWords];
#pragma unroll
    for (int j = 0; j < kWords * kRows; ++j) {
      sum[j / kSlots].template add_row<kWeighted>(v[j], kWeighted ? weights[j % kSlots] : 1.0f);
    }
#pragma unroll
    for (int u = 0; u < kWords; ++u) {
      if (i + u * kWarpSize < count) store_once(out + i + u * kWarpSize, sum[u].round());
    }
  }
}

// The same of n rows, kRows <= n <= kMax.
template <int kRows, int kMax, bool kWeighted>
DEEPEP_DEVICE void gather_few(Team team, const RowShare& share, const Sources& sources, uint4* out,
                              int count, int n) {
  if constexpr (kRows < kMax) {
    if (n > kRows) {
      return gather_few<kRows + 1, kMax, kWeighted>(team, share, sources, out, count, n);
    }
  }
  gather_exactly<kRows, kWeighted>(team, share, sources, out, count);
}

// The sum of any number of rows, and of biases.
template <bool kWeighted>
DEEPEP_DEVICE void gather_many(Team team, const RowShare& share, const Sources& sources, uint4* out,
                               int count) {
#pragma unroll 1
  for (int base = share.part * kWarpSize; base < count; base += share.parts * kWarpSize) {
    const int i = base + team.lane();
    Sum8 sum;
    add_rows<2, false>(sum, sources.bias, 1.0f, sources.has_bias, i, count);
    add_rows<4, kWeighted>(sum, sources.row[0], sources.weight, sources.has_row[0], i, count);
    add_rows<4, false>(sum, sources.row[1], 1.0f, sources.has_row[1], i, count);
    if (i < count) store_once(out + i, sum.round());
  }
}

// This warp's part of a token's row.
template <int kMaxRows, class Plan>
DEEPEP_DEVICE void gather_row(Team team, const RowShare& share, const Plan& plan, int64_t token,
                              int num_rows, int hidden) {
  constexpr int kFew = kMaxRows != 0 && kMaxRows < 8 ? kMaxRows : 8;
  constexpr bool kWeighted = Plan::kWeighted;
  const Sources sources(team, plan, token, num_rows);
  auto* out = static_cast<uint4*>(plan.out(token));
  const int count = hidden / 8;
  const int n = __popc(sources.has_row[0]);
  if ((sources.has_bias | sources.has_row[1]) == 0 && n <= kFew) {
    gather_few<0, kFew, kWeighted>(team, share, sources, out, count, n);
  } else {
    gather_many<kWeighted>(team, share, sources, out, count);
  }
}

// The sum of one token by one warp; see host_rows.h. Four rows in flight are enough for a network,
// and leave registers to what else a kernel does.
template <int kMaxRows, class Plan>
DEEPEP_DEVICE void gather_one(Team team, const Plan& plan, int64_t token, int num_rows,
                              int hidden) {
  const Sources sources(team, plan, token, num_rows);
  auto* out = static_cast<uint4*>(plan.out(token));
  gather_many<Plan::kWeighted>(team, RowShare(), sources, out, hidden / 8);
}

// This warp's part of all rows.
template <int kMaxRows, class Plan>
DEEPEP_DEVICE void gather_by_loads(Grid grid, Team team, const Plan& plan, int num_tokens,
                                   int num_rows, int hidden) {
  const RowShare share(grid, team, num_tokens, (hidden / 8 + kWarpSize - 1) / kWarpSize);
  for (int token = share.first; token < num_tokens; token += share.stride) {
    gather_row<kMaxRows>(team, share, plan, token, num_rows, hidden);
  }
}

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_GATHER_CUH_

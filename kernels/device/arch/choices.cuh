// How a CUDA architecture spreads a token over its experts: lane k holds selection k. The names are
// those of host_choices.h, which says what each does.
#ifndef KERNELS_DEVICE_ARCH_CHOICES_CUH_
#define KERNELS_DEVICE_ARCH_CHOICES_CUH_

#include "kernels/abi/deepep_lowlatency.h"
#include "kernels/device/arch/cuda.cuh"

namespace deepep::arch {

// ---- Numbering: every warp counts a run of the selections, with counters of its own in shared
// memory; then it numbers them, beginning where the runs before it end.

constexpr int kNumberingBytes = 128 * 1024;  // of dynamic shared memory, at most

// Warps that take part, so that their counters fit.
__host__ __device__ inline int numbering_warps(int num_experts, int block_warps) {
  const int fit = kNumberingBytes / (num_experts * static_cast<int>(sizeof(int32_t)));
  return fit < block_warps ? fit : block_warps;
}
inline int numbering_bytes(int num_experts, int block_warps) {
  return numbering_warps(num_experts, block_warps) * num_experts *
         static_cast<int>(sizeof(int32_t));
}
static_assert(DEEPEP_MAX_LOW_LATENCY_EXPERTS * sizeof(int32_t) <= kNumberingBytes,
              "the counters of one warp fit");

template <class Expert>
DEEPEP_DEVICE void number_choices(Block block, Expert expert, int count, int num_experts,
                                  int32_t* index, int32_t* counts) {
  extern __shared__ __align__(128) char shared[];
  auto* counters = reinterpret_cast<int32_t*>(shared);  // [warp][expert]
  const int warp = block.lane() / kWarpSize, lane = block.lane() % kWarpSize;
  const int most = numbering_warps(num_experts, block.size() / kWarpSize);
  const int steps = (count + kWarpSize - 1) / kWarpSize;  // a warp's selections at a time
  constexpr int kBatch = 8;
  const int num_warps = steps < most ? steps : most;
  for (int i = block.lane(); i < num_warps * num_experts; i += block.size()) counters[i] = 0;
  __syncthreads();
  // Whole steps to each warp.
  const int run = num_warps > 0 ? (steps + num_warps - 1) / num_warps * kWarpSize : 0;
  const int begin = warp * run, end = begin + run < count ? begin + run : count;
  int32_t* own = counters + warp * num_experts;
  struct Step {
    int i, expert;
    int32_t number;  // selections of this expert before this one, by this warp
  };
  const auto step = [&](int base) {
    const int i = base + lane, e = i < end ? expert(i) : -1;
    const unsigned same = __match_any_sync(kAllLanes, e);
    const int before = __popc(same & ((1u << lane) - 1));
    const int32_t first = e >= 0 ? own[e] : 0;
    __syncwarp();
    if (e >= 0 && before == 0) own[e] = first + __popc(same);
    __syncwarp();
    return Step{i, e, first + before};
  };
  const auto write = [&](const Step& s, int32_t first) {
    if (s.i < end) index[s.i] = s.expert >= 0 ? first + s.number : -1;
  };
  const bool takes_part = warp < num_warps && begin < end;
  Step only{};
  for (int base = begin; takes_part && base < end; base += kWarpSize) only = step(base);
  __syncthreads();
  for (int e = block.lane(); e < num_experts; e += block.size()) {
    int32_t sum = 0;
    for (int w = 0; w < num_warps; w += kBatch) {
      int32_t here[kBatch];  // loaded together
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        here[j] = w + j < num_warps ? counters[(w + j) * num_experts + e] : 0;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (w + j < num_warps) counters[(w + j) * num_experts + e] = sum;
        sum += here[j];
      }
    }
    counts[e] = sum;
  }
  __syncthreads();
  if (takes_part && run == kWarpSize) {  // as it mostly is: the warp still has its one step
    write(only, only.expert >= 0 ? own[only.expert] : 0);
  } else if (takes_part) {
    for (int base = begin; base < end; base += kWarpSize) write(step(base), 0);
  }
  __syncthreads();
}

// ---- One token's selections

template <class Choice>
class Choices {
 public:
  template <class Find>
  DEEPEP_DEVICE Choices(Team team, int num_topk, Find find) : k_(team.lane()) {
    choice_.rank = -1;
    if (k_ < num_topk) choice_ = find(k_);
    set_ = __ballot_sync(kAllLanes, choice_.rank >= 0);
  }
  template <class Visit>
  DEEPEP_DEVICE void each_by_one(Visit visit) const {
    if (choice_.rank >= 0) visit(k_, choice_);
  }
  template <class Visit>
  DEEPEP_DEVICE void each_by_all(Visit visit) const {
    for (unsigned left = set_; left != 0; left &= left - 1) {
      visit(of_lane(__ffs(static_cast<int>(left)) - 1));
    }
  }
  template <class Value, class Visit>
  DEEPEP_DEVICE void each_pair(Team team, int count, Value value, Visit visit) const {
    const int pairs = __popc(set_) * count;
    for (int base = 0; base < pairs; base += kWarpSize) {
      const int pair = base + team.lane();
      const bool inside = pair < pairs;
      const int i = inside ? pair % count : 0;
      const int lane = inside ? nth_lane(pair / count) : 0;
      const auto v = value(i);
      const Choice choice = of_lane(lane);
      if (inside) visit(choice, i, v);
    }
  }

 private:
  DEEPEP_DEVICE Choice of_lane(int lane) const {
    return {
        __shfl_sync(kAllLanes, choice_.rank, lane), __shfl_sync(kAllLanes, choice_.expert, lane),
        static_cast<int64_t>(__shfl_sync(kAllLanes, static_cast<long long>(choice_.row), lane))};
  }
  // The lane of the n-th selection that is set.
  DEEPEP_DEVICE int nth_lane(int n) const {
    const bool no_gaps = (set_ & (set_ + 1)) == 0;
    return no_gaps ? n : static_cast<int>(__fns(set_, 0, n + 1));
  }

  int k_;
  Choice choice_;
  unsigned set_;
};

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_CHOICES_CUH_

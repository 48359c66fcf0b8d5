// Primitives of the "sm80" architecture: rows are moved by 16-byte loads and stores, many in
// flight. Compiled to machine code for 8.0 and to PTX, so it also serves the GPUs between 8.0
// and 9.0.
#ifndef KERNELS_DEVICE_ARCH_SM80_CUH_
#define KERNELS_DEVICE_ARCH_SM80_CUH_

#include "kernels/device/arch/cast.cuh"
#include "kernels/device/arch/choices.cuh"
#include "kernels/device/arch/cuda.cuh"
#include "kernels/device/arch/gather.cuh"

namespace deepep::arch {

// Reads a row once and writes it to any number of places. The places are gathered first; the copy
// happens in commit, a tile of the row at a time, so that every word is loaded once.
class RowSender {
 public:
  DEEPEP_DEVICE explicit RowSender(Team, int64_t /*row_bytes*/) {}
  DEEPEP_DEVICE int64_t chunk_bytes(int64_t row_bytes) const { return row_bytes; }

  DEEPEP_DEVICE void see_arrivals() {}  // see host_rows.h
  DEEPEP_DEVICE void fetch(Team, const void* row, int64_t bytes) {
    row_ = static_cast<const uint4*>(row);
    count_ = static_cast<int>(bytes / 16);
    place_[0] = place_[1] = nullptr;
  }
  // A lane has at most two places: 64 ranks, 32 lanes.
  DEEPEP_DEVICE void put(void* place) {
    if (place_[0] == nullptr) {
      place_[0] = static_cast<uint4*>(place);
    } else {
      place_[1] = static_cast<uint4*>(place);
    }
  }
  DEEPEP_DEVICE void commit(Team team) {
    constexpr int kUnroll = 8;
    team.sync();
    const unsigned has[2] = {__ballot_sync(kAllLanes, place_[0] != nullptr),
                             __ballot_sync(kAllLanes, place_[1] != nullptr)};
    for (int base = 0; base < count_; base += kUnroll * kWarpSize) {
      uint4 v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int i = base + u * kWarpSize + team.lane();
        if (i < count_) v[u] = load_once(row_ + i);
      }
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        for (unsigned left = has[slot]; left != 0; left &= left - 1) {
          const int lane = __ffs(static_cast<int>(left)) - 1;
          auto* place = reinterpret_cast<uint4*>(
              __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(place_[slot]), lane));
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const int i = base + u * kWarpSize + team.lane();
            if (i < count_) store_once(place + i, v[u]);
          }
        }
      }
    }
  }
  // Plain stores: the grid's closing release covers them.
  DEEPEP_DEVICE void finish(Team) {}

 private:
  const uint4* row_ = nullptr;
  int count_ = 0;
  uint4* place_[2] = {nullptr, nullptr};
};

template <int kNumRanks, class Plan>
DEEPEP_DEVICE void gather_rows(Grid grid, Team team, const Plan& plan, int num_tokens,
                               int num_ranks, int hidden) {
  gather_by_loads<kNumRanks>(grid, team, plan, num_tokens, num_ranks, hidden);
}

constexpr int kSendThreads = 640, kGatherThreads = 512;  // more would spill registers
constexpr int kRailSendThreads = 256, kRailGatherThreads = 256;
inline LaunchShape send_shape(int num_blocks, int64_t /*row_bytes*/) {
  return {num_blocks, kSendThreads, 0};
}
// Across nodes, where every warp sums rows of its own.
inline LaunchShape rail_send_shape(int num_blocks, int64_t /*row_bytes*/) {
  return {num_blocks, kRailSendThreads, 0};
}
inline LaunchShape rail_gather_shape(int num_blocks) { return {num_blocks, kRailGatherThreads, 0}; }
inline LaunchShape gather_shape(int num_blocks, int /*num_ranks*/, int64_t /*row_bytes*/) {
  return {num_blocks, kGatherThreads, 0};
}

DEEPEP_DEVICE uint32_t to_e4m3x2(float low, float high) {
  return float_to_e4m3(low) | static_cast<uint32_t>(float_to_e4m3(high)) << 8;
}

// Of the low-latency kernels.
constexpr int kCastThreads = 512, kMoveThreads = 512, kChoiceThreads = 384;
constexpr int dispatch_threads(bool /*staged*/) { return kCastThreads; }
inline LaunchShape dispatch_shape(int num_blocks, int64_t /*row_bytes*/, int num_experts,
                                  bool /*staged*/) {
  return {num_blocks, kCastThreads, numbering_bytes(num_experts, kCastThreads / kWarpSize)};
}
inline LaunchShape move_shape(int num_blocks, int64_t /*row_bytes*/) {
  return {num_blocks, kMoveThreads, 0};
}
inline LaunchShape choice_shape(int num_blocks, int64_t /*row_bytes*/, bool /*moves*/) {
  return {num_blocks, kChoiceThreads, 0};
}

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_SM80_CUH_

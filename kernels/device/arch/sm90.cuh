// Primitives of the "sm90" architecture: rows are moved by the bulk copy engine, through shared
// memory, one elected lane for each copy.
#ifndef KERNELS_DEVICE_ARCH_SM90_CUH_
#define KERNELS_DEVICE_ARCH_SM90_CUH_

#include <cuda_fp8.h>

#include "kernels/device/arch/bulk.cuh"
#include "kernels/device/arch/bulk_gather.cuh"
#include "kernels/device/arch/cast.cuh"
#include "kernels/device/arch/choices.cuh"
#include "kernels/device/arch/cuda.cuh"

namespace deepep::arch {

// Reads a row, or equal parts of it one after another, once into shared memory and writes it from
// there to any number of places. Every warp has a stage of its own; the warps of a block overlap
// each other's loads and stores.
class RowSender {
 public:
  DEEPEP_DEVICE RowSender(Team team, int64_t row_bytes) {
    extern __shared__ __align__(128) char stages[];
    __shared__ uint64_t barriers[kWarpSize];
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    chunk_ = stage_bytes(row_bytes, static_cast<int>(blockDim.x) / kWarpSize);
    stage_ = stages + warp * chunk_;
    barrier_ = &barriers[warp];
    if (team.lane() == 0) init_barrier(barrier_);
    fence_barrier_init();
    fence_bulk();  // of shared memory and rows that plain loads and stores have touched before
    team.sync();
  }
  DEEPEP_DEVICE int64_t chunk_bytes(int64_t) const { return chunk_; }
  // See host_rows.h. The copy engine has a way to memory of its own.
  DEEPEP_DEVICE void see_arrivals() { fence_bulk(); }

  DEEPEP_DEVICE void fetch(Team team, const void* row, int64_t bytes) {
    bytes_ = static_cast<int>(bytes);
    wait_stores_read();  // this lane's stores of the last row have left the stage
    team.sync();
    if (team.lane() == 0) {
      expect_bytes(barrier_, bytes_);
      bulk_load(stage_, row, bytes_, barrier_);
    }
    arrived_ = false;
  }
  // The lane waits for the row when it has its first place to send it to.
  DEEPEP_DEVICE void put(void* place) {
    await_row();
    bulk_store(place, stage_, bytes_);
  }
  DEEPEP_DEVICE void commit(Team) {
    await_row();
    phase_ ^= 1;
    commit_stores();
  }
  // Complete, not only read: what follows may tell peers that the rows are there.
  DEEPEP_DEVICE void finish(Team team) {
    wait_stores_done();
    team.sync();
  }

  // Of each of a block's warps; whole kStageStep bytes.
  static __host__ __device__ int stage_bytes(int64_t row_bytes, int num_warps) {
    int most = kSharedBytes / num_warps / kStageStep * kStageStep;
    if (most > kMaxStage) most = kMaxStage;
    const int64_t parts = row_bytes > most ? (row_bytes + most - 1) / most : 1;
    const int64_t bytes = (row_bytes + parts - 1) / parts;
    return static_cast<int>((bytes + kStageStep - 1) / kStageStep * kStageStep);
  }
  static constexpr int kMaxStage = 32 * 1024, kStageStep = 128;
  static constexpr int kSharedBytes = 200 * 1024;  // of 227 KiB: static shared memory needs some

 private:
  DEEPEP_DEVICE void await_row() {
    if (!arrived_) wait_barrier(barrier_, phase_);
    arrived_ = true;
  }

  char* stage_;
  uint64_t* barrier_;
  int chunk_, bytes_ = 0;
  unsigned phase_ = 0;
  bool arrived_ = true;
};

template <int kNumRanks, class Plan>
DEEPEP_DEVICE void gather_rows(Grid grid, Team team, const Plan& plan, int num_tokens,
                               int num_ranks, int hidden) {
  if constexpr (!Plan::kWeighted) {
    if (num_ranks <= kGatherSlots) {
      return BulkGather<Plan>(grid, team, plan, num_tokens, num_ranks, hidden).run();
    }
  }
  gather_by_loads<kNumRanks>(grid, team, plan, num_tokens, num_ranks, hidden);
}

constexpr int kSendThreads = 768, kGatherThreads = 512;
constexpr int kRailSendThreads = 512, kRailGatherThreads = 256;  // more would spill registers
inline LaunchShape send_shape(int num_blocks, int64_t row_bytes, int max_threads = kSendThreads) {
  int warps = RowSender::kSharedBytes / RowSender::stage_bytes(row_bytes, 1);  // of whole rows
  if (warps > max_threads / kWarpSize) warps = max_threads / kWarpSize;
  return {num_blocks, warps * kWarpSize, warps * RowSender::stage_bytes(row_bytes, warps)};
}
static_assert(kGatherSharedBytes + 4 * 1024 <= 227 * 1024, "room for static shared memory");
// Across nodes, where every warp sums rows of its own.
inline LaunchShape rail_send_shape(int num_blocks, int64_t row_bytes) {
  return send_shape(num_blocks, row_bytes, kRailSendThreads);
}
inline LaunchShape rail_gather_shape(int num_blocks) { return {num_blocks, kRailGatherThreads, 0}; }
inline LaunchShape gather_shape(int num_blocks, int num_ranks, int64_t row_bytes) {
  if (num_ranks > kGatherSlots) return {num_blocks, kGatherThreads, 0};
  const GatherShape shape(num_ranks, row_bytes, kGatherThreads / kWarpSize);
  return {num_blocks, kGatherThreads, shape.shared_bytes()};
}

DEEPEP_DEVICE uint32_t to_e4m3x2(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

// Of the low-latency kernels. `staged`: rows go through shared memory; casting needs registers
// only.
constexpr int kCastThreads = 1024, kMoveThreads = kSendThreads, kChoiceThreads = 512;
constexpr int dispatch_threads(bool staged) { return staged ? kSendThreads : kCastThreads; }
inline LaunchShape dispatch_shape(int num_blocks, int64_t row_bytes, int num_experts, bool staged) {
  LaunchShape shape{num_blocks, kCastThreads, 0};
  if (staged) shape = send_shape(num_blocks, row_bytes);
  const int numbering = numbering_bytes(num_experts, shape.num_threads / kWarpSize);
  if (shape.shared_bytes < numbering) shape.shared_bytes = numbering;
  return shape;
}
inline LaunchShape move_shape(int num_blocks, int64_t row_bytes) {
  return send_shape(num_blocks, row_bytes);
}
// `moves`: it sends rows before it sums.
inline LaunchShape choice_shape(int num_blocks, int64_t row_bytes, bool moves) {
  constexpr int kWarps = kChoiceThreads / kWarpSize;
  const int shared = moves ? kWarps * RowSender::stage_bytes(row_bytes, kWarps) : 0;
  return {num_blocks, kChoiceThreads, shared};
}

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_SM90_CUH_

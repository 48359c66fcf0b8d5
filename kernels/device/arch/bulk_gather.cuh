// Sum of a token's rows by the bulk copy engine: pieces of all its rows are fetched into shared
// memory one step ahead of the sums. Few warps keep many bytes in flight, which a link between GPUs
// needs.
#ifndef KERNELS_DEVICE_ARCH_BULK_GATHER_CUH_
#define KERNELS_DEVICE_ARCH_BULK_GATHER_CUH_

#include "kernels/device/arch/bulk.cuh"
#include "kernels/device/arch/gather.cuh"

namespace deepep::arch {

constexpr int kGatherStages = 2;
constexpr int kGatherSlots = 8;  // rows of a token that a stage holds; tokens with more go without
constexpr int kGatherSharedBytes = 224 * 1024;

// How shared memory is divided: the same on the host, which launches, and on the device.
struct GatherShape {
  int slots, warps, piece_bytes;

  __host__ __device__ GatherShape(int num_rows, int64_t row_bytes, int most_warps) {
    slots = num_rows < kGatherSlots ? num_rows : kGatherSlots;
    warps = slots > 4 ? 14 : 16;
    if (warps > most_warps) warps = most_warps;
    // Whole steps of a warp's 16-byte words, as many as fit.
    const int step = kWarpSize * 16;
    piece_bytes = kGatherSharedBytes / (warps * kGatherStages * slots) / step * step;
    if (piece_bytes > row_bytes) piece_bytes = static_cast<int>(row_bytes);
  }
  __host__ __device__ int stage_bytes() const { return slots * piece_bytes; }
  __host__ __device__ int shared_bytes() const { return warps * kGatherStages * stage_bytes(); }
};

// A walk over the pieces of this warp's tokens.
struct PieceCursor {
  int64_t token;
  int offset;  // bytes into the row

  DEEPEP_DEVICE void advance(int piece_bytes, int row_bytes, int step) {
    offset += piece_bytes;
    if (offset < row_bytes) return;
    offset = 0;
    token += step;
  }
};

// out = sum of kCount pieces that lie `stride` bytes apart in shared memory, with their weights.
template <int kCount, bool kWeighted>
DEEPEP_DEVICE void sum_pieces(int lane, const char* place, const float* weights, int stride,
                              char* out, int bytes) {
#pragma unroll 2
  for (int at = lane * 16; at < bytes; at += kWarpSize * 16) {
    uint4 v[kCount > 0 ? kCount : 1];
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      v[k] = *reinterpret_cast<const uint4*>(place + k * stride + at);
    Sum8 sum;
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum.add_row<kWeighted>(v[k], kWeighted ? weights[k] : 1.0f);
    store_once(reinterpret_cast<uint4*>(out + at), sum.round());
  }
}

template <int kMaxRows, class Plan>
class BulkGather {
 public:
  DEEPEP_DEVICE BulkGather(Grid grid, Team team, const Plan& plan, int num_tokens, int num_rows,
                           int hidden)
      : team_(team),
        plan_(plan),
        shape_(num_rows, int64_t{hidden} * 2, grid.teams_per_block()),
        num_tokens_(num_tokens),
        max_rows_(num_rows),
        row_bytes_(hidden * 2),
        step_(grid.num_teams()) {
    extern __shared__ __align__(128) char shared[];
    __shared__ uint64_t barriers[16][kGatherStages];
    __shared__ float weights[16][kGatherStages][kGatherSlots];
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    stages_ = shared + warp * kGatherStages * shape_.stage_bytes();
    barriers_ = barriers[warp];
    weights_ = weights[warp][0];
    if (team.lane() < kGatherStages) init_barrier(barriers_ + team.lane());
    fence_barrier_init();
    fence_bulk();  // peers' rows were acquired by plain loads, and are read by the copy engine
    team.sync();
    loading_ = summing_ = {grid.team(), 0};
  }

  DEEPEP_DEVICE void run() {
    int counts[kGatherStages];  // rows that a stage holds, or -1
    counts[0] = load_next(0);
    while (summing_.token < num_tokens_) {
#pragma unroll
      for (int stage = 0; stage < kGatherStages; ++stage) {
        if (summing_.token >= num_tokens_) break;
        const int other = stage ^ (kGatherStages - 1);
        team_.sync();  // all lanes have read what the other stage held
        counts[other] = load_next(other);
        sum_next(stage, counts[stage]);
      }
    }
  }

 private:
  DEEPEP_DEVICE int piece_at(int offset) const {
    const int left = row_bytes_ - offset;
    return left < shape_.piece_bytes ? left : shape_.piece_bytes;
  }

  // Starts the loads of the next piece of every row; each lane those of its ranks. Returns the
  // number of rows, or -1: the token goes without the copy engine.
  DEEPEP_DEVICE int load_next(int stage) {
    if (loading_.token >= num_tokens_) return 0;
    if (loading_.offset == 0) find_rows();
    const int bytes = piece_at(loading_.offset);
    if (num_rows_ > 0) {
      if (team_.lane() == 0) expect_bytes(barriers_ + stage, num_rows_ * bytes);
      team_.sync();
      char* place = stages_ + stage * shape_.stage_bytes();
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        if (row_[half] == nullptr) continue;
        bulk_load(place + slot_[half] * shape_.piece_bytes, row_[half] + loading_.offset, bytes,
                  barriers_ + stage);
        if constexpr (Plan::kWeighted) weights_[stage * kGatherSlots + slot_[half]] = weight_;
      }
    }
    loading_.advance(shape_.piece_bytes, row_bytes_, step_);
    return num_rows_;
  }

  // The rows of the token that is being loaded: this lane's, and where in a stage they go.
  DEEPEP_DEVICE void find_rows() {
    const unsigned below = (1u << team_.lane()) - 1;
    num_rows_ = 0;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int i = team_.lane() + half * kWarpSize;
      const void* row = i < max_rows_ ? plan_.row(loading_.token, i) : nullptr;
      if constexpr (Plan::kWeighted) {
        if (row != nullptr) weight_ = plan_.weight(loading_.token, i);
      }
      row_[half] = static_cast<const char*>(row);
      const unsigned has_row = __ballot_sync(kAllLanes, row != nullptr);
      slot_[half] = num_rows_ + __popc(has_row & below);
      num_rows_ += __popc(has_row);
    }
    const bool biased = plan_.bias(0, 0) != nullptr || plan_.bias(0, 1) != nullptr;
    if (biased || num_rows_ > shape_.slots) num_rows_ = -1;
  }

  DEEPEP_DEVICE void sum_next(int stage, int count) {
    const PieceCursor now = summing_;
    summing_.advance(shape_.piece_bytes, row_bytes_, step_);
    if (count < 0) {
      if (now.offset == 0) {
        gather_row<kMaxRows>(team_, plan_, now.token, max_rows_, row_bytes_ / 2);
      }
      return;
    }
    if (count > 0) {
      wait_barrier(barriers_ + stage, phases_ >> stage & 1);
      phases_ ^= 1u << stage;
    }
    const char* place = stages_ + stage * shape_.stage_bytes();
    char* out = static_cast<char*>(plan_.out(now.token)) + now.offset;
    const int lane = team_.lane(), bytes = piece_at(now.offset), stride = shape_.piece_bytes;
    const float* weights = weights_ + stage * kGatherSlots;
    constexpr bool kWeighted = Plan::kWeighted;
    switch (count) {
      case 0:
        return sum_pieces<0, kWeighted>(lane, place, weights, stride, out, bytes);
      case 1:
        return sum_pieces<1, kWeighted>(lane, place, weights, stride, out, bytes);
      case 2:
        return sum_pieces<2, kWeighted>(lane, place, weights, stride, out, bytes);
      case 3:
        return sum_pieces<3, kWeighted>(lane, place, weights, stride, out, bytes);
      case 4:
        return sum_pieces<4, kWeighted>(lane, place, weights, stride, out, bytes);
      case 5:
        return sum_pieces<5, kWeighted>(lane, place, weights, stride, out, bytes);
      case 6:
        return sum_pieces<6, kWeighted>(lane, place, weights, stride, out, bytes);
      case 7:
        return sum_pieces<7, kWeighted>(lane, place, weights, stride, out, bytes);
      default:
        return sum_pieces<8, kWeighted>(lane, place, weights, stride, out, bytes);
    }
  }

  static constexpr int kHalves = kMaxRows != 0 && kMaxRows <= kWarpSize ? 1 : 2;

  Team team_;
  const Plan& plan_;
  GatherShape shape_;
  int num_tokens_, max_rows_, row_bytes_, step_;
  char* stages_;
  uint64_t* barriers_;
  float* weights_;  // [stage][slot]
  unsigned phases_ = 0;
  PieceCursor loading_, summing_;
  const char* row_[kHalves];
  int slot_[kHalves];
  float weight_ = 1.0f;  // of this lane's row; where rows have weights, kHalves is 1
  int num_rows_ = 0;
};

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_BULK_GATHER_CUH_

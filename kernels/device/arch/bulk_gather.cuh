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

// A walk over this warp's pieces of its tokens.
struct PieceCursor {
  int token;
  int offset;  // bytes into the row

  DEEPEP_DEVICE void advance(const RowShare& share, int piece_bytes, int row_bytes) {
    offset += share.parts * piece_bytes;
    if (offset < row_bytes) return;
    offset = share.part * piece_bytes;
    token += share.stride;
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
        share_(grid, team, num_tokens, (row_bytes_ + shape_.piece_bytes - 1) / shape_.piece_bytes),
        lanes_(num_rows <= 8    ? 8
               : num_rows <= 16 ? 16
                                : kWarpSize),
        group_(kWarpSize / lanes_ - 1) {
    if (team.lane() < kGatherStages) init_barrier(barrier(team.lane()));
    fence_barrier_init();
    fence_bulk();  // peers' rows were acquired by plain loads, and are read by the copy engine
    team.sync();
    loading_ = summing_ = {share_.first, first_offset()};
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
  // Of this warp. Found anew each time, since registers are scarce.
  DEEPEP_DEVICE char* stage(int i) const {
    extern __shared__ __align__(128) char shared[];
    return shared + (warp() * kGatherStages + i) * shape_.stage_bytes();
  }
  static DEEPEP_DEVICE uint64_t* barrier(int stage) {
    __shared__ uint64_t barriers[16][kGatherStages];
    return barriers[warp()] + stage;
  }
  static DEEPEP_DEVICE float* weights(int stage) {
    __shared__ float weights[16][kGatherStages][kGatherSlots];
    return weights[warp()][stage];
  }
  // Of this warp's first piece of a token.
  DEEPEP_DEVICE int first_offset() const { return share_.part * shape_.piece_bytes; }
  static DEEPEP_DEVICE int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }

  DEEPEP_DEVICE int piece_at(int offset) const {
    const int left = row_bytes_ - offset;
    return left < shape_.piece_bytes ? left : shape_.piece_bytes;
  }

  // Starts the loads of the next piece of every row; each lane that of its row. Returns the number
  // of rows, or -1: the token goes without the copy engine.
  DEEPEP_DEVICE int load_next(int at) {
    if (loading_.token >= num_tokens_) return 0;
    if (loading_.offset == first_offset()) next_token();
    const int bytes = piece_at(loading_.offset);
    if (num_rows_ > 0) {
      if (team_.lane() == 0) expect_bytes(barrier(at), num_rows_ * bytes);
      team_.sync();
      char* place = stage(at);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        if ((has_row_[half] >> team_.lane() & 1) == 0) continue;
        const int slot = __popc(has_row_[half] & ((1u << team_.lane()) - 1)) +
                         (half > 0 ? __popc(has_row_[0]) : 0);
        bulk_load(place + slot * shape_.piece_bytes, row_[half] + loading_.offset, bytes,
                  barrier(at));
        if constexpr (kWeighted) weights(at)[slot] = weight_;
      }
    }
    loading_.advance(share_, shape_.piece_bytes, row_bytes_);
    return num_rows_;
  }

  // Goes on to the rows of the token that is to be loaded.
  DEEPEP_DEVICE void next_token() {
    if (++group_ * lanes_ == kWarpSize) group_ = 0;
    if (group_ == 0) find_rows();
    const unsigned mine = lanes_ == kWarpSize ? kAllLanes : ((1u << lanes_) - 1) << group_ * lanes_;
    num_rows_ = 0;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      has_row_[half] = __ballot_sync(kAllLanes, row_[half] != nullptr) & mine;
      num_rows_ += __popc(has_row_[half]);
    }
    const bool biased = plan_.bias(0, 0) != nullptr || plan_.bias(0, 1) != nullptr;
    if (biased || num_rows_ > shape_.slots) num_rows_ = -1;
  }

  // The rows of that token and the next ones, as many as the lanes can hold, one a lane. Several
  // loads that wait for each other lead to a row, and behind the copies of the whole multiprocessor
  // each takes long: so not before every token.
  DEEPEP_DEVICE void find_rows() {
    const int token = loading_.token + team_.lane() / lanes_ * share_.stride;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int i = team_.lane() % lanes_ + half * kWarpSize;
      const bool inside = token < num_tokens_ && i < max_rows_;
      const void* row = inside ? plan_.row(token, i) : nullptr;
      if constexpr (kWeighted) {
        if (row != nullptr) weight_ = plan_.weight(token, i);
      }
      row_[half] = static_cast<const char*>(row);
    }
  }

  DEEPEP_DEVICE void sum_next(int at, int count) {
    const PieceCursor now = summing_;
    summing_.advance(share_, shape_.piece_bytes, row_bytes_);
    if (count < 0) {
      if (now.offset == first_offset()) {
        const Sources sources(team_, plan_, now.token, max_rows_);
        auto* row = static_cast<uint4*>(plan_.out(now.token));
        gather_many<kWeighted>(team_, share_, sources, row, row_bytes_ / 16);
      }
      return;
    }
    if (count > 0) {
      wait_barrier(barrier(at), phases_ >> at & 1);
      phases_ ^= 1u << at;
    }
    const char* place = stage(at);
    char* out = static_cast<char*>(plan_.out(now.token)) + now.offset;
    const int lane = team_.lane(), bytes = piece_at(now.offset), stride = shape_.piece_bytes;
    const float* w = kWeighted ? weights(at) : nullptr;
    switch (count) {
      case 0:
        return sum_pieces<0, kWeighted>(lane, place, w, stride, out, bytes);
      case 1:
        return sum_pieces<1, kWeighted>(lane, place, w, stride, out, bytes);
      case 2:
        return sum_pieces<2, kWeighted>(lane, place, w, stride, out, bytes);
      case 3:
        return sum_pieces<3, kWeighted>(lane, place, w, stride, out, bytes);
      case 4:
        return sum_pieces<4, kWeighted>(lane, place, w, stride, out, bytes);
      case 5:
        return sum_pieces<5, kWeighted>(lane, place, w, stride, out, bytes);
      case 6:
        return sum_pieces<6, kWeighted>(lane, place, w, stride, out, bytes);
      case 7:
        return sum_pieces<7, kWeighted>(lane, place, w, stride, out, bytes);
      default:
        return sum_pieces<8, kWeighted>(lane, place, w, stride, out, bytes);
    }
  }

  static constexpr bool kWeighted = Plan::kWeighted;
  static constexpr int kHalves = kMaxRows != 0 && kMaxRows <= kWarpSize ? 1 : 2;

  Team team_;
  const Plan& plan_;
  GatherShape shape_;
  int num_tokens_, max_rows_, row_bytes_;
  RowShare share_;
  int lanes_;  // that a token's rows take, one each (two, where kHalves is 2)
  int group_;  // of lanes_ lanes: which has the token that is being loaded
  unsigned phases_ = 0;
  PieceCursor loading_, summing_;
  const char* row_[kHalves];
  unsigned has_row_[kHalves];  // lanes that have a row of the token that is being loaded
  float weight_ = 1.0f;  // of this lane's row; where rows have weights, kHalves is 1
  int num_rows_ = 0;
};

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_BULK_GATHER_CUH_

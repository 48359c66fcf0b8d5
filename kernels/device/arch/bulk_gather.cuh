// Sum of a token's few rows by the bulk copy engine: pieces of all of them are fetched into shared
// memory one step ahead of the sums. Few warps keep many bytes in flight, which a link between GPUs
// needs. With more rows the pieces would be too small for the engine, and loads by all lanes keep
// as much in flight.
#ifndef KERNELS_DEVICE_ARCH_BULK_GATHER_CUH_
#define KERNELS_DEVICE_ARCH_BULK_GATHER_CUH_

#include "kernels/device/arch/bulk.cuh"
#include "kernels/device/arch/gather.cuh"

namespace deepep::arch {

constexpr int kGatherStages = 2;
constexpr int kGatherSlots = 4;  // rows of a token, at most
constexpr int kGatherSharedBytes = 220 * 1024;  // of 227 KiB: static shared memory needs some
constexpr int kGatherWarps = 16;  // of a block, at most

// How shared memory is divided: the same on the host, which launches, and on the device.
struct GatherShape {
  int slots, warps, piece_bytes;

  __host__ __device__ GatherShape(int num_rows, int64_t row_bytes, int num_warps)
      : slots(num_rows), warps(num_warps) {
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

// out = sum of kCount pieces that lie `stride` bytes apart in shared memory.
template <int kCount>
DEEPEP_DEVICE void sum_pieces(int lane, const char* place, int stride, char* out, int bytes) {
#pragma unroll 2
  for (int at = lane * 16; at < bytes; at += kWarpSize * 16) {
    uint4 v[kCount > 0 ? kCount : 1];
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      v[k] = *reinterpret_cast<const uint4*>(place + k * stride + at);
    Sum8 sum;
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum.add(v[k]);
    store_once(reinterpret_cast<uint4*>(out + at), sum.round());
  }
}

// For at most kGatherSlots rows a token, without weights.
template <class Plan>
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
        share_(grid, team, num_tokens, (row_bytes_ + shape_.piece_bytes - 1) / shape_.piece_bytes) {
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
  static constexpr int kGroups = kWarpSize / kGatherSlots;  // of lanes; each has a token's rows

  // Of this warp. Found anew each time, since registers are scarce.
  DEEPEP_DEVICE char* stage(int i) const {
    extern __shared__ __align__(128) char shared[];
    return shared + (warp() * kGatherStages + i) * shape_.stage_bytes();
  }
  static DEEPEP_DEVICE uint64_t* barrier(int stage) {
    __shared__ uint64_t barriers[kGatherWarps][kGatherStages];
    return barriers[warp()] + stage;
  }
  static DEEPEP_DEVICE int warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }

  // Of this warp's first piece of a token.
  DEEPEP_DEVICE int first_offset() const { return share_.part * shape_.piece_bytes; }
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
      if (has_row_ >> team_.lane() & 1) {
        const int slot = __popc(has_row_ & ((1u << team_.lane()) - 1));
        bulk_load(stage(at) + slot * shape_.piece_bytes, row_ + loading_.offset, bytes,
                  barrier(at));
      }
    }
    loading_.advance(share_, shape_.piece_bytes, row_bytes_);
    return num_rows_;
  }

  // Goes on to the rows of the token that is to be loaded.
  DEEPEP_DEVICE void next_token() {
    if (++group_ == kGroups) group_ = 0;
    if (group_ == 0) find_rows();
    const unsigned mine = ((1u << kGatherSlots) - 1) << group_ * kGatherSlots;
    has_row_ = __ballot_sync(kAllLanes, row_ != nullptr) & mine;
    const bool biased = plan_.bias(0, 0) != nullptr || plan_.bias(0, 1) != nullptr;
    num_rows_ = biased ? -1 : __popc(has_row_);
  }

  // The rows of that token and the next ones, as many as the lanes can hold, one a lane. Several
  // loads that wait for each other lead to a row, and behind the copies of the whole multiprocessor
  // each takes long: so not before every token.
  DEEPEP_DEVICE void find_rows() {
    const int token = loading_.token + team_.lane() / kGatherSlots * share_.stride;
    const int i = team_.lane() % kGatherSlots;
    const bool inside = token < num_tokens_ && i < max_rows_;
    row_ = inside ? static_cast<const char*>(plan_.row(token, i)) : nullptr;
  }

  DEEPEP_DEVICE void sum_next(int at, int count) {
    const PieceCursor now = summing_;
    summing_.advance(share_, shape_.piece_bytes, row_bytes_);
    if (count < 0) {
      if (now.offset == first_offset()) {
        const Sources sources(team_, plan_, now.token, max_rows_);
        auto* row = static_cast<uint4*>(plan_.out(now.token));
        gather_many<false>(team_, share_, sources, row, row_bytes_ / 16);
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
    switch (count) {
      case 0:
        return sum_pieces<0>(lane, place, stride, out, bytes);
      case 1:
        return sum_pieces<1>(lane, place, stride, out, bytes);
      case 2:
        return sum_pieces<2>(lane, place, stride, out, bytes);
      case 3:
        return sum_pieces<3>(lane, place, stride, out, bytes);
      default:
        return sum_pieces<kGatherSlots>(lane, place, stride, out, bytes);
    }
  }

  Team team_;
  const Plan& plan_;
  GatherShape shape_;
  int num_tokens_, max_rows_, row_bytes_;
  RowShare share_;
  PieceCursor loading_, summing_;
  unsigned phases_ = 0;
  const char* row_ = nullptr;  // of this lane; group_ says whether of the token being loaded
  int group_ = kGroups - 1;  // of lanes: which has the token that is being loaded
  unsigned has_row_ = 0;  // lanes of that group with a row
  int num_rows_ = 0;  // of that token
};

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_BULK_GATHER_CUH_

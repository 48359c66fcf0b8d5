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

  __host__ __device__ GatherShape(int num_ranks, int64_t row_bytes) {
    slots = num_ranks < kGatherSlots ? num_ranks : kGatherSlots;
    warps = slots > 4 ? 14 : 16;
    // Whole steps of a warp's 16-byte words, as many as fit.
    const int step = kWarpSize * 16;
    piece_bytes = kGatherSharedBytes / (warps * kGatherStages * slots) / step * step;
    if (piece_bytes > row_bytes) piece_bytes = static_cast<int>(row_bytes);
  }
  __host__ __device__ int stage_bytes() const { return slots * piece_bytes; }
  __host__ __device__ int shared_bytes() const { return warps * kGatherStages * stage_bytes(); }
};

template <int kNumRanks, class Plan>
class BulkGather {
 public:
  DEEPEP_DEVICE BulkGather(Grid grid, Team team, const Plan& plan, int num_tokens, int num_ranks,
                           int hidden)
      : team_(team),
        plan_(plan),
        shape_(num_ranks, int64_t{hidden} * 2),
        num_ranks_(num_ranks),
        hidden_(hidden),
        first_(grid.team()),
        step_(grid.num_teams()) {
    extern __shared__ __align__(128) char shared[];
    __shared__ uint64_t barriers[16][kGatherStages];
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    stages_ = shared + warp * kGatherStages * shape_.stage_bytes();
    barriers_ = barriers[warp];
    if (team.lane() < kGatherStages) init_barrier(barriers_ + team.lane());
    fence_barrier_init();
    fence_bulk();  // peers' rows were acquired by plain loads, and are read by the copy engine
    team.sync();
    pieces_ = (hidden * 2 + shape_.piece_bytes - 1) / shape_.piece_bytes;
    const int tokens = first_ < num_tokens ? (num_tokens - first_ + step_ - 1) / step_ : 0;
    num_items_ = tokens * pieces_;
  }

  DEEPEP_DEVICE void run() {
    int sources[kGatherStages];
    sources[0] = num_items_ > 0 ? issue(0, 0) : 0;
    for (int item = 0; item < num_items_; item += kGatherStages) {
#pragma unroll
      for (int stage = 0; stage < kGatherStages; ++stage) {
        const int now = item + stage, next = now + 1;
        if (now >= num_items_) break;
        team_.sync();  // all lanes have read what the next stage held
        constexpr int kOther = kGatherStages - 1;
        if (next < num_items_) sources[stage ^ kOther] = issue(next, stage ^ kOther);
        consume(now, stage, sources[stage]);
      }
    }
  }

 private:
  DEEPEP_DEVICE int64_t token_of(int item) const {
    return first_ + int64_t{item / pieces_} * step_;
  }
  DEEPEP_DEVICE int offset_of(int item) const { return item % pieces_ * shape_.piece_bytes; }
  DEEPEP_DEVICE int bytes_of(int item) const {
    const int left = hidden_ * 2 - offset_of(item);
    return left < shape_.piece_bytes ? left : shape_.piece_bytes;
  }

  // Starts the loads of one piece of every row; each lane those of its ranks. Returns the number of
  // rows, or -1: the token goes without the copy engine.
  DEEPEP_DEVICE int issue(int item, int stage) {
    const Sources sources(team_, plan_, token_of(item), num_ranks_);
    const int n = __popc(sources.has_row[0]) + __popc(sources.has_row[1]);
    if (sources.has_bias != 0 || n > shape_.slots) return -1;
    const int bytes = bytes_of(item);
    if (n > 0 && team_.lane() == 0) expect_bytes(barriers_ + stage, n * bytes);
    team_.sync();
    const unsigned below = (1u << team_.lane()) - 1;
    char* place = stages_ + stage * shape_.stage_bytes();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (sources.row[half] == nullptr) continue;
      const int slot =
          __popc(sources.has_row[half] & below) + (half == 1 ? __popc(sources.has_row[0]) : 0);
      bulk_load(place + slot * shape_.piece_bytes,
                reinterpret_cast<const char*>(sources.row[half]) + offset_of(item), bytes,
                barriers_ + stage);
    }
    return n;
  }

  DEEPEP_DEVICE void consume(int item, int stage, int n) {
    if (n < 0) {
      if (offset_of(item) == 0) {
        gather_row<kNumRanks>(team_, plan_, token_of(item), num_ranks_, hidden_);
      }
      return;
    }
    if (n > 0) {
      wait_barrier(barriers_ + stage, phases_ >> stage & 1);
      phases_ ^= 1u << stage;
    }
    const char* place = stages_ + stage * shape_.stage_bytes();
    char* out = static_cast<char*>(plan_.out(token_of(item))) + offset_of(item);
    for (int at = team_.lane() * 16; at < bytes_of(item); at += kWarpSize * 16) {
      Sum8 sum;
#pragma unroll
      for (int k = 0; k < kGatherSlots; ++k) {
        if (k < n) sum.add(*reinterpret_cast<const uint4*>(place + k * shape_.piece_bytes + at));
      }
      store_once(reinterpret_cast<uint4*>(out + at), sum.round());
    }
  }

  Team team_;
  const Plan& plan_;
  GatherShape shape_;
  int num_ranks_, hidden_, first_, step_, pieces_, num_items_;
  char* stages_;
  uint64_t* barriers_;
  unsigned phases_ = 0;
};

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_BULK_GATHER_CUH_

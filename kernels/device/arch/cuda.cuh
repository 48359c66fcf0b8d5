// Primitives that all CUDA architectures share: memory order, time, teams, counting, launches.
// Included by sm80.cuh and sm90.cuh, which add how rows are moved; the names are those of host.h.
#ifndef KERNELS_DEVICE_ARCH_CUDA_CUH_
#define KERNELS_DEVICE_ARCH_CUDA_CUH_

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "kernels/abi/deepep_kernel.h"
#include "kernels/host/status.h"

#define DEEPEP_DEVICE __device__ __forceinline__
#define DEEPEP_ANYWHERE __host__ __device__ __forceinline__  // on the host and on the device
#define DEEPEP_KERNEL(max_threads) static __global__ void __launch_bounds__(max_threads, 1)
#define DEEPEP_SHARED __shared__
#define DEEPEP_ROLLED _Pragma("unroll 1")
#define DEEPEP_UNROLL _Pragma("unroll")

namespace deepep::arch {

constexpr bool kReadsArguments = false;  // argument tensors lie on the device
constexpr bool kAsksCaller = false;      // who has gone on long ago
constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxDevices = 64;

// ---- Memory order. System scope: peers are other devices and other processes.

DEEPEP_DEVICE uint64_t load_acquire(const uint64_t* ptr) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(ptr) : "memory");
  return value;
}
DEEPEP_DEVICE uint64_t load_relaxed(const uint64_t* ptr) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(ptr) : "memory");
  return value;
}
DEEPEP_DEVICE void store_release(uint64_t* ptr, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(ptr), "l"(value) : "memory");
}
DEEPEP_DEVICE void store_relaxed(uint64_t* ptr, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(ptr), "l"(value) : "memory");
}
// See host_base.h.
DEEPEP_DEVICE void fence_cells() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
DEEPEP_DEVICE uint64_t load_cell(const uint64_t* ptr) { return load_relaxed(ptr); }
DEEPEP_DEVICE void store_cell(uint64_t* ptr, uint64_t value) { store_relaxed(ptr, value); }
// Generic addresses: the fault record is host memory. Only kernels of this device change it, and
// atomics of the system's scope on host memory are defined on some machines only.
DEEPEP_DEVICE uint32_t exchange_if_zero(uint32_t* ptr, uint32_t value) {
  return atomicCAS(ptr, 0u, value);
}
DEEPEP_DEVICE void store_fault_code(uint64_t* ptr, uint64_t value) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(ptr), "l"(value) : "memory");
}
DEEPEP_DEVICE void fetch_or(uint64_t* ptr, uint64_t bits) {
  atomicOr(reinterpret_cast<unsigned long long*>(ptr), static_cast<unsigned long long>(bits));
}
DEEPEP_DEVICE void fetch_add(int64_t* ptr, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(ptr), static_cast<unsigned long long>(value));
}
DEEPEP_DEVICE int32_t load_flag(const int32_t* ptr) {
  return *static_cast<const volatile int32_t*>(ptr);
}
DEEPEP_DEVICE void store_flag(int32_t* ptr, int32_t value) {
  *static_cast<volatile int32_t*>(ptr) = value;
}

// ---- Time

DEEPEP_DEVICE uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// A spinning thread costs nobody anything: its block has the multiprocessor to itself.
struct Backoff {
  DEEPEP_DEVICE void pause() const {}
};

// ---- Teams

struct Block {
  DEEPEP_DEVICE int lane() const { return static_cast<int>(threadIdx.x); }
  DEEPEP_DEVICE int size() const { return static_cast<int>(blockDim.x); }
  DEEPEP_DEVICE void sync() const { __syncthreads(); }
  DEEPEP_DEVICE bool any(bool value) const { return __syncthreads_or(value) != 0; }
};

struct Team {
  DEEPEP_DEVICE int lane() const { return static_cast<int>(threadIdx.x) % kWarpSize; }
  DEEPEP_DEVICE int size() const { return kWarpSize; }
  DEEPEP_DEVICE void sync() const { __syncwarp(); }
  DEEPEP_DEVICE bool any(bool value) const { return __any_sync(kAllLanes, value) != 0; }
  DEEPEP_DEVICE uint32_t max(uint32_t value) const { return __reduce_max_sync(kAllLanes, value); }
};
constexpr int kLanesOfOne = 1;  // see host_base.h

struct Grid {
  DEEPEP_DEVICE int block() const { return static_cast<int>(blockIdx.x); }
  DEEPEP_DEVICE int num_blocks() const { return static_cast<int>(gridDim.x); }
  DEEPEP_DEVICE int teams_per_block() const { return static_cast<int>(blockDim.x) / kWarpSize; }
  DEEPEP_DEVICE int team() const {
    return block() * teams_per_block() + static_cast<int>(threadIdx.x) / kWarpSize;
  }
  DEEPEP_DEVICE int num_teams() const { return num_blocks() * teams_per_block(); }
  DEEPEP_DEVICE int thread() const {
    return block() * static_cast<int>(blockDim.x + 0) + static_cast<int>(threadIdx.x);
  }
  DEEPEP_DEVICE int num_threads() const { return num_blocks() * static_cast<int>(blockDim.x); }

  // Each block's thread 0 releases what its block has done, by the fence, and the last one acquires
  // it all, by the atomic: the barriers before and after extend that to all threads.
  DEEPEP_DEVICE bool is_last_block(uint32_t* arrivals) const {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t earlier;
      asm volatile("fence.acq_rel.sys;" ::: "memory");
      asm volatile("atom.add.acquire.gpu.global.u32 %0, [%1], 1;"
                   : "=r"(earlier)
                   : "l"(arrivals)
                   : "memory");
      last = earlier == gridDim.x - 1;
    }
    __syncthreads();
    return last;
  }
};

DEEPEP_DEVICE Block this_block() { return {}; }
DEEPEP_DEVICE Team this_team() { return {}; }
DEEPEP_DEVICE Grid this_grid() { return {}; }

// ---- Counting

// See host_base.h. Gathered per block in shared memory where the counts fit.
class Histogram {
 public:
  DEEPEP_DEVICE Histogram(int32_t* result, int32_t* sums, int count, int32_t* shared,
                          int shared_count)
      : result_(result),
        sums_(sums),
        count_(count),
        shared_(count <= shared_count ? shared : nullptr) {
    if (shared_ == nullptr) return;
    for (int i = threadIdx.x; i < count; i += blockDim.x) shared_[i] = 0;
    __syncthreads();
  }
  DEEPEP_DEVICE void add(int index) { atomicAdd((shared_ ? shared_ : sums_) + index, 1); }
  DEEPEP_DEVICE void flush() {
    if (shared_ == nullptr) return;
    __syncthreads();
    for (int i = threadIdx.x; i < count_; i += blockDim.x) {
      if (shared_[i] != 0) atomicAdd(sums_ + i, shared_[i]);
    }
  }
  DEEPEP_DEVICE void finish() {
    for (int i = threadIdx.x; i < count_; i += blockDim.x) result_[i] = atomicExch(sums_ + i, 0);
  }

 private:
  int32_t* result_;
  int32_t* sums_;
  int count_;
  int32_t* shared_;
};

// Numbers what is_set(i) holds for, in order: index[i * stride] becomes the number from `first` on,
// or -1. By the whole block, a tile of as many as it has threads at a time.
template <class IsSet>
DEEPEP_DEVICE int32_t number_set(Block block, IsSet is_set, int32_t* index, int count, int stride,
                                 int32_t first) {
  __shared__ int32_t warp_sums[kWarpSize];
  const int warp = block.lane() / kWarpSize, lane = block.lane() % kWarpSize;
  const int num_warps = block.size() / kWarpSize;
  for (int base = 0; base < count; base += block.size()) {
    const int64_t at = static_cast<int64_t>(base + block.lane()) * stride;
    const bool inside = base + block.lane() < count;
    const bool flag = inside && is_set(base + block.lane());
    const unsigned set = __ballot_sync(kAllLanes, flag);
    if (lane == 0) warp_sums[warp] = __popc(set);
    __syncthreads();
    int32_t before = 0, total = 0;
    for (int w = 0; w < num_warps; ++w) {
      const int32_t sum = warp_sums[w];
      if (w < warp) before += sum;
      total += sum;
    }
    const int32_t rank_in_warp = __popc(set & ((1u << lane) - 1));
    if (inside) index[at] = flag ? first + before + rank_in_warp : -1;
    first += total;
    __syncthreads();
  }
  return first;
}

// Numbers the set flags of one column in order; see host_base.h.
DEEPEP_DEVICE int32_t number_flags(Block block, const uint8_t* flags, int32_t* index, int count,
                                   int stride, int32_t first) {
  const auto is_set = [=](int i) { return flags[static_cast<int64_t>(i) * stride] != 0; };
  return number_set(block, is_set, index, count, stride, first);
}

// See host_base.h.
DEEPEP_DEVICE int32_t number_groups(Block block, const uint8_t* flags, int width, int flags_stride,
                                    int32_t* index, int count, int stride) {
  const auto is_set = [=](int i) {
    const uint8_t* group = flags + static_cast<int64_t>(i) * flags_stride;
    bool set = false;
    for (int j = 0; j < width; ++j) set |= group[j] != 0;
    return set;
  };
  return number_set(block, is_set, index, count, stride, 0);
}

// See host_base.h. A warp looks at as many entries at a time as it has lanes.
DEEPEP_DEVICE int64_t next_set(Team team, const int32_t* entries, int64_t stride, int64_t begin,
                               int64_t end, int64_t step) {
  for (; begin < end; begin += step * kWarpSize) {
    const int64_t mine = begin + team.lane() * step;
    const bool is_set = mine < end && entries[mine * stride] >= 0;
    const unsigned set = __ballot_sync(kAllLanes, is_set);
    if (set != 0) return begin + (__ffs(static_cast<int>(set)) - 1) * step;
  }
  return begin;
}

// ---- Targets of a token; see host.h. Lane l holds the rank `first + l`, and that + 32 if there
// are so many.

template <int kNumRanks>
class Targets {
 public:
  template <class Limit>
  DEEPEP_DEVICE Targets(Team team, const int32_t* rows, int num_ranks, int first, Limit limit) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int i = team.lane() + half * kWarpSize;
      const int turn = i + first;
      rank_[half] = turn < num_ranks ? turn : turn - num_ranks;
      row_[half] = i < num_ranks ? rows[rank_[half]] : -1;
      if (row_[half] >= 0 && row_[half] >= limit(rank_[half])) row_[half] = -1;
    }
  }
  template <class Visit>
  DEEPEP_DEVICE void each_by_one(Visit visit) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (row_[half] >= 0) visit(rank_[half], int64_t{row_[half]});
    }
  }
  template <class Visit>
  DEEPEP_DEVICE void each_by_all(Visit visit) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      unsigned left = __ballot_sync(kAllLanes, row_[half] >= 0);
      for (; left != 0; left &= left - 1) {
        const int lane = __ffs(static_cast<int>(left)) - 1;
        visit(__shfl_sync(kAllLanes, rank_[half], lane),
              int64_t{__shfl_sync(kAllLanes, row_[half], lane)});
      }
    }
  }

 private:
  static constexpr int kHalves = kNumRanks != 0 && kNumRanks <= kWarpSize ? 1 : 2;
  int rank_[kHalves];
  int32_t row_[kHalves];
};

// ---- Copies of plain words

DEEPEP_DEVICE uint4 load_once(const uint4* ptr) {
  uint4 v;
#ifdef DEEPEP_AGGRESSIVE_PTX
  // Non-coherent loads of memory that a peer has written during this kernel: undefined by the PTX
  // manual, works on the GPUs it was measured on. Off by default.
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
#else
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
#endif
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(ptr));
  return v;
}
DEEPEP_DEVICE void store_once(uint4* ptr, const uint4& v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(ptr), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// This thread's share of a copy that the whole grid makes. Multiples of 16 bytes, or of 4.
DEEPEP_DEVICE void copy_slice(Grid grid, const void* from, void* to, int64_t bytes) {
  const bool wide = bytes % 16 == 0 && reinterpret_cast<uint64_t>(from) % 16 == 0;
  if (!wide) {
    const auto* source = static_cast<const uint32_t*>(from);
    for (int64_t i = grid.thread(); i < bytes / 4; i += grid.num_threads()) {
      static_cast<uint32_t*>(to)[i] = source[i];
    }
    return;
  }
  constexpr int kUnroll = 4;
  const auto* source = static_cast<const uint4*>(from);
  auto* target = static_cast<uint4*>(to);
  const int64_t count = bytes / 16, step = grid.num_threads();
  int64_t i = grid.thread();
  for (; i + (kUnroll - 1) * step < count; i += kUnroll * step) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = load_once(source + i + u * step);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) store_once(target + i + u * step, v[u]);
  }
  for (; i < count; i += step) store_once(target + i, load_once(source + i));
}

// A copy that one warp makes, of a multiple of 16 bytes.
DEEPEP_DEVICE void copy_row(Team team, const void* from, void* to, int64_t bytes) {
  constexpr int kUnroll = 2;
  const auto* source = static_cast<const uint4*>(from);
  auto* target = static_cast<uint4*>(to);
  const int count = static_cast<int>(bytes / 16);
  for (int base = team.lane(); base < count; base += kUnroll * kWarpSize) {
    uint4 v[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kWarpSize < count) v[u] = load_once(source + base + u * kWarpSize);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kWarpSize < count) store_once(target + base + u * kWarpSize, v[u]);
    }
  }
}

// ---- Launch

struct LaunchShape {
  int num_blocks;
  int num_threads;
  int shared_bytes;  // dynamic
};

inline int32_t device_error(const char* what, cudaError_t error) {
  return refuse(DEEPEP_DEVICE_ERROR, "%s: %s", what, cudaGetErrorString(error));
}

// More than 48 KiB of shared memory, static ones included, must be asked for, once for each kernel
// and device. Of each kernel, not of each type of kernels: many have the same arguments.
template <auto kKernel>
cudaError_t allow_shared(int bytes) {
  static std::atomic<int> allowed[kMaxDevices];
  if (bytes == 0) return cudaSuccess;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  if (device < kMaxDevices && allowed[device].load(std::memory_order_relaxed) >= bytes) {
    return cudaSuccess;
  }
  const cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < kMaxDevices) allowed[device] = bytes;
  return error;
}

template <auto kKernel, class... Args>
int32_t launch(void* stream, LaunchShape shape, const Args&... args) {
  if (const cudaError_t error = allow_shared<kKernel>(shape.shared_bytes)) {
    return device_error("cudaFuncSetAttribute", error);
  }
  kKernel<<<shape.num_blocks, shape.num_threads, shape.shared_bytes,
            static_cast<cudaStream_t>(stream)>>>(args...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? DEEPEP_OK : device_error("launch", error);
}

// A GPU's operations are only launched; their faults are found by the host's next look.
inline int32_t outcome(const DeepEpContext&) { return DEEPEP_OK; }

// Shapes of kernels that move no rows: one token or one flag a thread.
constexpr int kCountThreads = 128, kExchangeThreads = 1024, kRailExchangeThreads = 512;
inline LaunchShape count_shape(int num_tokens, int max_blocks) {
  const int blocks = (num_tokens + kCountThreads - 1) / kCountThreads;
  return {blocks < 1 ? 1 : blocks < max_blocks ? blocks : max_blocks, kCountThreads, 0};
}
inline LaunchShape exchange_shape(int num_ranks, int max_blocks, int threads = kExchangeThreads) {
  return {num_ranks < max_blocks ? num_ranks : max_blocks, threads, 0};
}

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_CUDA_CUH_

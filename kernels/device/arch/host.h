// Primitives of the "host" architecture: one thread is a rank's whole grid, memory is shared
// memory. Used by kernels/device/** under the names that sm80.cuh and sm90.cuh give to their own
// versions. Knows nothing of the protocols.
#ifndef KERNELS_DEVICE_ARCH_HOST_H_
#define KERNELS_DEVICE_ARCH_HOST_H_

#include <time.h>

#include <cstdint>
#include <cstring>

#include "kernels/abi/deepep_kernel.h"

#define DEEPEP_DEVICE inline
#define DEEPEP_ANYWHERE inline
#define DEEPEP_KERNEL(max_threads) static void
#define DEEPEP_ALWAYS_INLINE inline __attribute__((always_inline))
#define DEEPEP_SHARED  // one thread is a block

// Tests of the race detector build with an ordering taken away, and expect to see the race.
#ifdef DEEPEP_PLANT_MISSING_RELEASE
#define DEEPEP_RELEASE __ATOMIC_RELAXED
#else
#define DEEPEP_RELEASE __ATOMIC_RELEASE
#endif
#ifdef DEEPEP_PLANT_MISSING_ACQUIRE
#define DEEPEP_ACQUIRE __ATOMIC_RELAXED
#else
#define DEEPEP_ACQUIRE __ATOMIC_ACQUIRE
#endif

// The wide forms are chosen when the library is loaded. A race detector has not started by then.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define DEEPEP_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define DEEPEP_WIDE
#endif

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define DEEPEP_STREAMS
#include <emmintrin.h>
#endif

namespace deepep::arch {

constexpr int64_t kStreamBytes = 1024;  // rows shorter than this are written through the caches

// Argument tensors can be read by the host code that checks them before a launch.
constexpr bool kReadsArguments = true;

// ---- Memory order

inline uint64_t load_acquire(const uint64_t* ptr) { return __atomic_load_n(ptr, DEEPEP_ACQUIRE); }
inline uint64_t load_relaxed(const uint64_t* ptr) { return __atomic_load_n(ptr, __ATOMIC_RELAXED); }
inline void store_release(uint64_t* ptr, uint64_t value) {
  __atomic_store_n(ptr, value, DEEPEP_RELEASE);
}
inline void store_relaxed(uint64_t* ptr, uint64_t value) {
  __atomic_store_n(ptr, value, __ATOMIC_RELAXED);
}
// On the host-readable structs, which only this rank's thread writes.
inline uint32_t exchange_if_zero(uint32_t* ptr, uint32_t value) {
  uint32_t old = 0;
  __atomic_compare_exchange_n(ptr, &old, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return old;
}
inline void store_fault_code(uint64_t* ptr, uint64_t value) {
  __atomic_store_n(ptr, value, __ATOMIC_RELEASE);
}
inline void fetch_or(uint64_t* ptr, uint64_t bits) {
  __atomic_fetch_or(ptr, bits, __ATOMIC_RELAXED);
}

// ---- Time

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

// What a wait does between two looks: spin while the peer is likely to be running, then let others
// run, then sleep, so that many more ranks than cores make progress.
class Backoff {
 public:
  void pause() {
    ++looks_;
    if (looks_ < 64) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      return;
    }
    const uint64_t sleep_ns = looks_ < 256 ? 1000 : looks_ < 1024 ? 50000 : 200000;
    timespec t{0, static_cast<long>(sleep_ns)};
    nanosleep(&t, nullptr);
  }

 private:
  int looks_ = 0;
};

// ---- Teams: all threads of a block, and the unit that moves a row (a warp on a GPU)

struct Team {
  int lane() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  bool any(bool value) const { return value; }
};

struct Grid {
  int block() const { return 0; }
  int num_blocks() const { return 1; }
  int team() const { return 0; }       // index of this thread's team in the grid
  int num_teams() const { return 1; }
  int thread() const { return 0; }     // index of this thread in the grid
  int num_threads() const { return 1; }
  // True in the last block to come here, for all its threads; what the other blocks did before is
  // visible to it.
  bool is_last_block(uint32_t* /*arrivals*/) const { return true; }
};

inline Team this_block() { return {}; }
inline Team this_team() { return {}; }
inline Grid this_grid() { return {}; }

// ---- Counting

// Adds to counters in global memory, gathered per block first where that pays.
class Histogram {
 public:
  Histogram(int32_t* counters, int /*count*/, int32_t* /*shared*/, int /*shared_count*/)
      : counters_(counters) {}
  void add(int index) { ++counters_[index]; }
  void flush() {}

 private:
  int32_t* counters_;
};

// Numbers the set flags of one column in order: index[i * stride] = first + (set flags before i),
// or -1 where the flag is not set.
inline int32_t number_flags(Team, const uint8_t* flags, int32_t* index, int count, int stride,
                            int32_t first) {
  for (int i = 0; i < count; ++i) {
    const int64_t at = static_cast<int64_t>(i) * stride;
    index[at] = flags[at] ? first++ : -1;
  }
  return first;
}

// ---- Rows

// The ranks that one token goes to, and the row at each. `rows` has an entry per rank, -1 for none;
// `limit(rank)` rows fit there. Visits begin with rank `first`, so that not all ranks write to the
// same memory at the same time.
template <int kNumRanks>
class Targets {
 public:
  template <class Limit>
  Targets(Team, const int32_t* rows, int num_ranks, int first, Limit limit)
      : rows_(rows), num_ranks_(num_ranks), first_(first) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (rows[rank] >= 0 && rows[rank] < limit(rank)) fits_ |= uint64_t{1} << rank;
    }
  }
  // Calls visit(rank, row) once for each target, by one lane.
  template <class Visit>
  void each_by_one(Visit visit) const {
    for (int i = 0; i < num_ranks_; ++i) {
      const int rank = first_ + i < num_ranks_ ? first_ + i : first_ + i - num_ranks_;
      if (fits_ >> rank & 1) visit(rank, int64_t{rows_[rank]});
    }
  }
  // Calls visit(rank, row) for each target, by all lanes together.
  template <class Visit>
  void each_by_all(Visit visit) const {
    each_by_one(visit);
  }

 private:
  const int32_t* rows_;
  int num_ranks_, first_;
  uint64_t fits_ = 0;
};

// This thread's share of a copy that the whole grid makes.
inline void copy_slice(Grid, const void* from, void* to, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

// Writes past the caches, since a receiver's tensor is larger than they are: an ordinary store
// reads its line first, half as much traffic again. Such stores are ordered by finish_rows alone.
inline void stream_row(void* place, const void* row, int64_t bytes) {
#ifdef DEEPEP_STREAMS
  if (bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(place) % 16 == 0) {
    auto* to = static_cast<__m128i*>(place);
    const auto* from = static_cast<const __m128i*>(row);
    for (int64_t i = 0; i < bytes / 16; ++i) _mm_stream_si128(to + i, _mm_loadu_si128(from + i));
    return;  // rows are multiples of 16 bytes
  }
#endif
  std::memcpy(place, row, static_cast<size_t>(bytes));
}
inline void finish_rows() {
#ifdef DEEPEP_STREAMS
  _mm_sfence();
#endif
}

// Reads a row once and writes it to any number of places.
class RowSender {
 public:
  RowSender(Team, int64_t /*row_bytes*/) {}
  // Rows are sent in pieces of at most this size.
  int64_t chunk_bytes(int64_t row_bytes) const { return row_bytes; }

  void fetch(Team, const void* row, int64_t bytes) {
    row_ = row;
    bytes_ = bytes;
  }
  // Called by one lane for each place.
  void put(void* place) { stream_row(place, row_, bytes_); }
  void commit(Team) {}
  // All rows are where they belong, and ordered before the next release by this thread.
  void finish(Team) { finish_rows(); }

 private:
  const void* row_ = nullptr;
  int64_t bytes_ = 0;
};

inline float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Round to nearest even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

// out = BF16(sum of kRows rows in the given order), in FP32, starting from zero: one pass, the sums
// stay in registers.
template <int kRows>
DEEPEP_ALWAYS_INLINE void sum_few_rows(const uint16_t* const* rows, uint16_t* __restrict out,
                                       int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0.0f;
    for (int r = 0; r < kRows; ++r) sum += bf16_to_float(rows[r][i]);
    out[i] = float_to_bf16(sum);
  }
}

// The same for any number of rows, a tile that stays in the first-level cache at a time.
DEEPEP_ALWAYS_INLINE void sum_many_rows(const uint16_t* const* rows, int num_rows, uint16_t* out,
                                        int64_t count) {
  constexpr int64_t kTile = 512;  // elements
  float sums[kTile];
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t n = count - begin < kTile ? count - begin : kTile;
    for (int64_t i = 0; i < n; ++i) sums[i] = 0.0f;
    for (int r = 0; r < num_rows; ++r) {
      const uint16_t* row = rows[r] + begin;
      for (int64_t i = 0; i < n; ++i) sums[i] += bf16_to_float(row[i]);
    }
    for (int64_t i = 0; i < n; ++i) out[begin + i] = float_to_bf16(sums[i]);
  }
}

DEEPEP_WIDE inline void sum_rows_host(const uint16_t* const* rows, int num_rows, uint16_t* out,
                                      int64_t count) {
  switch (num_rows) {
    case 1:
      return sum_few_rows<1>(rows, out, count);
    case 2:
      return sum_few_rows<2>(rows, out, count);
    case 3:
      return sum_few_rows<3>(rows, out, count);
    case 4:
      return sum_few_rows<4>(rows, out, count);
    case 5:
      return sum_few_rows<5>(rows, out, count);
    case 6:
      return sum_few_rows<6>(rows, out, count);
    case 7:
      return sum_few_rows<7>(rows, out, count);
    case 8:
      return sum_few_rows<8>(rows, out, count);
    default:
      return sum_many_rows(rows, num_rows, out, count);
  }
}

// For every token of this team: out = sum of its rows, read where they lie. `plan` tells the rows:
// plan.bias(token, i) for i < 2 and plan.row(token, rank), each NULL where there is none; the order
// of the sum is bias 0, bias 1, then ranks ascending. plan.out(token) is the place of the result.
template <int kNumRanks, class Plan>
void gather_rows(Grid, Team, const Plan& plan, int num_tokens, int num_ranks, int hidden) {
  const uint16_t* rows[2 + (kNumRanks != 0 ? kNumRanks : DEEPEP_MAX_RANKS)];
  for (int token = 0; token < num_tokens; ++token) {
    int n = 0;
    for (int i = 0; i < 2; ++i) {
      if (const void* bias = plan.bias(token, i)) rows[n++] = static_cast<const uint16_t*>(bias);
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (const void* row = plan.row(token, rank)) rows[n++] = static_cast<const uint16_t*>(row);
    }
    sum_rows_host(rows, n, static_cast<uint16_t*>(plan.out(token)), hidden);
  }
}

// ---- Launch

struct LaunchShape {};
// Threads of a block, at most; of kernels that count, exchange, send rows and gather rows.
constexpr int kCountThreads = 1, kExchangeThreads = 1, kSendThreads = 1, kGatherThreads = 1;
inline LaunchShape count_shape(int /*num_tokens*/, int /*max_blocks*/) { return {}; }
inline LaunchShape exchange_shape(int /*num_ranks*/, int /*max_blocks*/) { return {}; }
inline LaunchShape send_shape(int /*num_blocks*/, int64_t /*row_bytes*/) { return {}; }
inline LaunchShape gather_shape(int /*num_blocks*/, int /*num_ranks*/, int64_t /*row_bytes*/) {
  return {};
}

// Runs the kernel to its end, in the caller's thread. Returns a DeepEpStatus.
template <class... Params, class... Args>
int32_t launch(void* /*stream*/, LaunchShape, void (*kernel)(Params...), const Args&... args) {
  kernel(args...);
  return DEEPEP_OK;
}

inline int32_t zero(void* /*stream*/, void* ptr, int64_t bytes) {
  std::memset(ptr, 0, static_cast<size_t>(bytes));
  return DEEPEP_OK;
}

// What the operation that has just been launched came to, as far as the host can know by now.
inline int32_t outcome(const DeepEpContext& context) {
  return static_cast<int32_t>(__atomic_load_n(&context.fault->code, __ATOMIC_ACQUIRE));
}

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_HOST_H_

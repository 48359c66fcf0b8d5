// What the "host" architecture is made of: memory order, time, teams, counting. One thread is a
// rank's whole grid, memory is shared memory. Included by host.h and its other parts.
#ifndef KERNELS_DEVICE_ARCH_HOST_BASE_H_
#define KERNELS_DEVICE_ARCH_HOST_BASE_H_

#include <time.h>

#include <cstdint>
#include <cstring>

#include "kernels/abi/deepep_kernel.h"

#define DEEPEP_DEVICE inline
#define DEEPEP_ANYWHERE inline
#define DEEPEP_KERNEL(max_threads) static void
#define DEEPEP_ALWAYS_INLINE inline __attribute__((always_inline))
#define DEEPEP_SHARED  // one thread is a block
#define DEEPEP_ROLLED  // before a loop whose copies would take registers
#define DEEPEP_UNROLL _Pragma("GCC unroll 8")  // before a loop of a few steps

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

namespace deepep::arch {

// Argument tensors can be read by the host code that checks them before a launch.
constexpr bool kReadsArguments = true;
constexpr bool kAsksCaller = true;  // its thread is the one that waits

// ---- Memory order

inline uint64_t load_acquire(const uint64_t* ptr) { return __atomic_load_n(ptr, DEEPEP_ACQUIRE); }
inline uint64_t load_relaxed(const uint64_t* ptr) { return __atomic_load_n(ptr, __ATOMIC_RELAXED); }
inline void store_release(uint64_t* ptr, uint64_t value) {
  __atomic_store_n(ptr, value, DEEPEP_RELEASE);
}
inline void store_relaxed(uint64_t* ptr, uint64_t value) {
  __atomic_store_n(ptr, value, __ATOMIC_RELAXED);
}
// Cells are words that carry their own epoch (kernels/device/lowlatency/cells.h). A thread that has
// written what a cell announces calls fence_cells() before store_cell(); one that then reads that
// has seen the cell by load_acquire(). load_cell() is for values that announce nothing. Here the
// accesses order by themselves.
inline void fence_cells() {}
inline uint64_t load_cell(const uint64_t* ptr) { return load_acquire(ptr); }
inline void store_cell(uint64_t* ptr, uint64_t value) { store_release(ptr, value); }
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
inline void fetch_add(int64_t* ptr, int64_t value) {
  __atomic_fetch_add(ptr, value, __ATOMIC_RELAXED);
}
// A flag that any thread of this rank may set at any time.
inline int32_t load_flag(const int32_t* ptr) { return __atomic_load_n(ptr, __ATOMIC_RELAXED); }
inline void store_flag(int32_t* ptr, int32_t value) {
  __atomic_store_n(ptr, value, __ATOMIC_RELAXED);
}

// ---- Time

#ifdef DEEPEP_SIMULATED_TIME
}  // namespace deepep::arch
uint64_t deepep_simulated_now_ns();  // of a test that decides what happens when
namespace deepep::arch {
inline uint64_t now_ns() { return deepep_simulated_now_ns(); }
#else
inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}
#endif

// Called in every wait of this thread: what else has to go on meanwhile. Returns whether it has let
// time pass itself.
struct WaitHook {
  int32_t (*call)(void* self) = nullptr;
  void* self = nullptr;
};
inline thread_local WaitHook wait_hook;

// What a wait does between two looks: spin while the peer is likely to be running, then let others
// run, then sleep, so that many more ranks than cores make progress.
class Backoff {
 public:
  void pause() {
    if (wait_hook.call != nullptr && wait_hook.call(wait_hook.self) != 0) return;
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
  uint32_t max(uint32_t value) const { return value; }
};
constexpr int kLanesOfOne = 32;  // a team's one lane does the work of as many

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

// Counts that all blocks make together, gathered per block first where that pays. Blocks add up in
// `sums`, zeros that the counts begin with and leave behind; the last block to have called flush
// writes the result.
class Histogram {
 public:
  Histogram(int32_t* result, int32_t* /*sums*/, int count, int32_t* /*shared*/,
            int /*shared_count*/)
      : counters_(result) {
    std::memset(result, 0, sizeof(int32_t) * static_cast<size_t>(count));
  }
  void add(int index) { ++counters_[index]; }
  void flush() {}
  void finish() {}

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

// The same of groups of `width` flags side by side, a group being set where one of its flags is:
// group i begins at flags[i * flags_stride], its number goes to index[i * stride], from 0 on.
inline int32_t number_groups(Team, const uint8_t* flags, int width, int flags_stride,
                             int32_t* index, int count, int stride) {
  int32_t next = 0;
  for (int i = 0; i < count; ++i) {
    bool is_set = false;
    for (int j = 0; j < width; ++j) is_set |= flags[int64_t{i} * flags_stride + j] != 0;
    index[int64_t{i} * stride] = is_set ? next++ : -1;
  }
  return next;
}

// The first i of begin, begin + step, ... whose entry is not negative, or one that is not below
// end.
inline int64_t next_set(Team, const int32_t* entries, int64_t stride, int64_t begin, int64_t end,
                        int64_t step) {
  while (begin < end && entries[begin * stride] < 0) begin += step;
  return begin;
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

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_HOST_BASE_H_

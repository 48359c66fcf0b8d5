// How the "host" architecture moves and sums rows: stores past the caches, sums that the compiler
// vectorises. Included by host.h.
#ifndef KERNELS_DEVICE_ARCH_HOST_ROWS_H_
#define KERNELS_DEVICE_ARCH_HOST_ROWS_H_

#include <cstdint>
#include <cstring>

#include "kernels/abi/deepep_kernel.h"
#include "kernels/device/arch/host_base.h"

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define DEEPEP_STREAMS
#include <emmintrin.h>
#endif

namespace deepep::arch {

constexpr int64_t kStreamBytes = 1024;  // rows shorter than this are written through the caches

// This thread's share of a copy that the whole grid makes.
inline void copy_slice(Grid, const void* from, void* to, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

// A copy that one team makes, of a multiple of 16 bytes.
inline void copy_row(Team, const void* from, void* to, int64_t bytes) {
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

  // What another rank has written while this kernel runs, and this one has acquired, is what the
  // next fetch reads.
  void see_arrivals() {}
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

// Rows and what each is multiplied by; the order is that of the sum.
struct WeightedRows {
  const uint16_t* const* rows;
  const float* weights;  // NULL: each is taken once
  int count;
};

// out = BF16(sum of kRows rows in the given order), in FP32, starting from zero: one pass, the sums
// stay in registers. A product is rounded before it is added.
template <int kRows, bool kWeighted>
DEEPEP_ALWAYS_INLINE void sum_few_rows(const WeightedRows& from, uint16_t* __restrict out,
                                       int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0.0f;
    for (int r = 0; r < kRows; ++r) {
      const float value = bf16_to_float(from.rows[r][i]);
      sum += kWeighted ? value * from.weights[r] : value;
    }
    out[i] = float_to_bf16(sum);
  }
}

// The same for any number of rows, a tile that stays in the first-level cache at a time.
template <bool kWeighted>
DEEPEP_ALWAYS_INLINE void sum_many_rows(const WeightedRows& from, uint16_t* out, int64_t count) {
  constexpr int64_t kTile = 512;  // elements
  float sums[kTile];
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t n = count - begin < kTile ? count - begin : kTile;
    for (int64_t i = 0; i < n; ++i) sums[i] = 0.0f;
    for (int r = 0; r < from.count; ++r) {
      const uint16_t* row = from.rows[r] + begin;
      const float weight = kWeighted ? from.weights[r] : 1.0f;
      for (int64_t i = 0; i < n; ++i) {
        const float value = bf16_to_float(row[i]);
        sums[i] += kWeighted ? value * weight : value;
      }
    }
    for (int64_t i = 0; i < n; ++i) out[begin + i] = float_to_bf16(sums[i]);
  }
}

template <bool kWeighted>
DEEPEP_ALWAYS_INLINE void sum_rows_of(const WeightedRows& from, uint16_t* out, int64_t count) {
  switch (from.count) {
    case 1:
      return sum_few_rows<1, kWeighted>(from, out, count);
    case 2:
      return sum_few_rows<2, kWeighted>(from, out, count);
    case 3:
      return sum_few_rows<3, kWeighted>(from, out, count);
    case 4:
      return sum_few_rows<4, kWeighted>(from, out, count);
    case 5:
      return sum_few_rows<5, kWeighted>(from, out, count);
    case 6:
      return sum_few_rows<6, kWeighted>(from, out, count);
    case 7:
      return sum_few_rows<7, kWeighted>(from, out, count);
    case 8:
      return sum_few_rows<8, kWeighted>(from, out, count);
    default:
      return sum_many_rows<kWeighted>(from, out, count);
  }
}

DEEPEP_WIDE inline void sum_plain_rows(const WeightedRows& from, uint16_t* out, int64_t count) {
  sum_rows_of<false>(from, out, count);
}
DEEPEP_WIDE inline void sum_weighted_rows(const WeightedRows& from, uint16_t* out, int64_t count) {
  sum_rows_of<true>(from, out, count);
}

// For one token: out = sum of its rows, read where they lie. `plan` tells the rows:
// plan.bias(token, i) for i < 2 and plan.row(token, i) for i < num_rows, each NULL where there is
// none; the order of the sum is bias 0, bias 1, then rows ascending. Where Plan::kWeighted, there
// is no bias, and row i is multiplied by plan.weight(token, i). plan.out(token) is the place of the
// result. kMaxRows: most rows of a token, 0: DEEPEP_MAX_RANKS.
template <int kMaxRows, class Plan>
void gather_one(Team, const Plan& plan, int64_t token, int num_rows, int hidden) {
  constexpr int kRoom = 2 + (kMaxRows != 0 ? kMaxRows : DEEPEP_MAX_RANKS);
  const uint16_t* rows[kRoom];
  float weights[kRoom];
  int n = 0;
  for (int i = 0; i < 2; ++i) {
    if (const void* bias = plan.bias(token, i)) rows[n++] = static_cast<const uint16_t*>(bias);
  }
  for (int i = 0; i < num_rows; ++i) {
    const void* row = plan.row(token, i);
    if (row == nullptr) continue;
    if constexpr (Plan::kWeighted) weights[n] = plan.weight(token, i);
    rows[n++] = static_cast<const uint16_t*>(row);
  }
  auto* out = static_cast<uint16_t*>(plan.out(token));
  if constexpr (Plan::kWeighted) {
    sum_weighted_rows({rows, weights, n}, out, hidden);
  } else {
    sum_plain_rows({rows, nullptr, n}, out, hidden);
  }
}

// The same for every token of this team.
template <int kMaxRows, class Plan>
void gather_rows(Grid, Team team, const Plan& plan, int num_tokens, int num_rows, int hidden) {
  for (int token = 0; token < num_tokens; ++token) {
    gather_one<kMaxRows>(team, plan, token, num_rows, hidden);
  }
}

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_HOST_ROWS_H_

// How the "host" architecture spreads a token over its experts, and casts it to FP8. Included by
// host.h.
#ifndef KERNELS_DEVICE_ARCH_HOST_CHOICES_H_
#define KERNELS_DEVICE_ARCH_HOST_CHOICES_H_

#include <cstdint>
#include <cstring>

#include "kernels/abi/deepep_lowlatency.h"
#include "kernels/device/arch/e4m3.h"
#include "kernels/device/arch/host_rows.h"

namespace deepep::arch {

// Numbers selections: index[i] = how many selections before i chose the same expert, or -1 where
// expert(i) is -1; counts[e] = how many chose expert e. By every block of the grid for itself; they
// all write the same.
template <class Expert>
void number_choices(Team, Expert expert, int count, int num_experts, int32_t* index,
                    int32_t* counts) {
  for (int e = 0; e < num_experts; ++e) counts[e] = 0;
  for (int i = 0; i < count; ++i) {
    const int e = expert(i);
    index[i] = e < 0 ? -1 : counts[e]++;
  }
}

// One token's selections, found by find(k); those whose rank is -1 are none.
template <class Choice>
class Choices {
 public:
  template <class Find>
  Choices(Team, int num_topk, Find find) {
    for (int k = 0; k < num_topk; ++k) {
      const Choice choice = find(k);
      if (choice.rank < 0) continue;
      k_[count_] = k;
      choice_[count_++] = choice;
    }
  }
  // Calls visit(k, choice) once for each, by one lane.
  template <class Visit>
  void each_by_one(Visit visit) const {
    for (int i = 0; i < count_; ++i) visit(k_[i], choice_[i]);
  }
  // Calls visit(choice) for each, by all lanes together.
  template <class Visit>
  void each_by_all(Visit visit) const {
    for (int i = 0; i < count_; ++i) visit(choice_[i]);
  }
  // Calls visit(choice, i, value(i)) once for each choice and each i < count, spread over the
  // lanes. value(i) is asked by all lanes together, each for its i.
  template <class Value, class Visit>
  void each_pair(Team, int count, Value value, Visit visit) const {
    for (int i = 0; i < count; ++i) {
      const auto v = value(i);
      for (int c = 0; c < count_; ++c) visit(choice_[c], i, v);
    }
  }

 private:
  int count_ = 0;
  int k_[DEEPEP_MAX_TOPK];
  Choice choice_[DEEPEP_MAX_TOPK];
};

// ---- Arithmetic that rounds after each step, on every architecture

inline float multiply(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }
inline float floor_of(float value) { return __builtin_floorf(value); }

// ---- BF16 to FP8

constexpr int kCastPiece = 512;  // elements that a team casts at a time

DEEPEP_WIDE inline void cast_group(const uint16_t* from, uint8_t* to, int count, bool rounded,
                                   float* scale_out) {
  float amax = kAmaxFloor;
  for (int i = 0; i < count; ++i) {
    const float value = bf16_to_float(static_cast<uint16_t>(from[i] & 0x7fff));
    amax = value > amax ? value : amax;
  }
  const GroupScale scale(amax, rounded);
  for (int i = 0; i < count; ++i) to[i] = float_to_e4m3(bf16_to_float(from[i]) * scale.factor);
  *scale_out = scale.stored;
}

// A piece of a row, cast: its bytes and the scale of each group of DEEPEP_FP8_GROUP.
class CastPiece {
 public:
  CastPiece(Team, const uint16_t* from, int size, bool rounded) : size_(size) {
    for (int begin = 0; begin < size; begin += DEEPEP_FP8_GROUP) {
      const int left = size - begin;
      cast_group(from + begin, bytes_ + begin, left < DEEPEP_FP8_GROUP ? left : DEEPEP_FP8_GROUP,
                 rounded, scale_ + begin / DEEPEP_FP8_GROUP);
    }
  }
  // By all lanes.
  void store(Team, char* place) const { std::memcpy(place, bytes_, static_cast<size_t>(size_)); }
  // The bits of group i's scale. By all lanes, each for its i.
  uint32_t scale(int i) const {
    uint32_t bits;
    std::memcpy(&bits, scale_ + i, sizeof(bits));
    return bits;
  }
  // The exponents of all groups, one byte each; 0 where there is none.
  uint32_t packed_scales() const {
    uint32_t word = 0;
    for (int i = 0; i * DEEPEP_FP8_GROUP < size_; ++i) word |= (scale(i) >> 23) << (8 * i);
    return word;
  }

 private:
  int size_;
  uint8_t bytes_[kCastPiece];
  float scale_[kCastPiece / DEEPEP_FP8_GROUP];
};

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_HOST_CHOICES_H_

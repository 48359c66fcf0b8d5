// LogFMT: BF16 rows in 10 bits an element, logarithmically; lossy. A sign and 9 bits of magnitude
// between the smallest and the largest of a group of DEEPEP_FP8_GROUP elements, at most 32 octaves.
//
// The formula is DeepEP V1's (its low-latency combine), per group instead of per several groups,
// and without its rule that all magnitudes be below 1. Groups lie where their BF16 elements would,
// so a receiver needs no offsets; one that gains nothing (all magnitudes are the same) stays in
// BF16.
//
// A slot: for each group its largest and smallest magnitude as BF16, then the groups: the low
// bytes, then for every 4 elements a byte with their ninth bits (0 to 3) and signs (4 to 7).
#ifndef KERNELS_DEVICE_LOWLATENCY_LOGFMT_H_
#define KERNELS_DEVICE_LOWLATENCY_LOGFMT_H_

#include "kernels/device/lowlatency/workspace.h"

namespace deepep {

constexpr int kLogElements = 4;  // that one lane handles together
constexpr int kLogLanes = DEEPEP_FP8_GROUP / kLogElements;
constexpr float kLogOctaves = 32.0f, kLogSteps = 510.0f;

// log2 of a positive, normal number: exponent, and the series of atanh for the mantissa. Within
// 1e-7, the same bits on every architecture.
DEEPEP_DEVICE float log2_of(float value) {
  const uint32_t bits = arch::float_bits(value);
  int exponent = static_cast<int>(bits >> 23) - 127;
  float m = arch::bits_to_float((bits & 0x7fffff) | 0x3f800000);
  if (m > 1.41421356f) {
    m *= 0.5f;
    ++exponent;
  }
  const float t = (m - 1.0f) / (m + 1.0f), tt = arch::multiply(t, t);
  float sum = arch::add(arch::multiply(tt, 1.0f / 7), 1.0f / 5);
  sum = arch::add(arch::multiply(tt, sum), 1.0f / 3);
  sum = arch::add(arch::multiply(tt, sum), 1.0f);
  return arch::add(static_cast<float>(exponent),
                   arch::multiply(arch::multiply(sum, t), 2.88539008f));  // 2 / ln 2
}

// 2 to the power of `value`; 0 below the normal numbers.
DEEPEP_DEVICE float exp2_of(float value) {
  if (value < -126.0f) return 0.0f;
  const float whole = arch::floor_of(value + 0.5f);
  const float r = arch::multiply(value - whole, 0.693147181f);
  float sum = 1.0f / 720;
  const float factors[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  DEEPEP_UNROLL
  for (int i = 0; i < 6; ++i) sum = arch::add(arch::multiply(sum, r), factors[i]);
  return arch::multiply(sum, arch::bits_to_float(static_cast<uint32_t>(whole + 127.0f) << 23));
}

// What a group's extremes say about its codes.
struct LogScale {
  float low, step;  // log2 of code 1, and between codes
  bool encoded;

  DEEPEP_DEVICE LogScale(float largest, float smallest) {
    constexpr float kLeastNormal = 1.17549435e-38f;
    // What is not finite, or too small for a logarithm, goes as it is.
    encoded = largest >= kLeastNormal && largest < 3.0e38f && smallest < largest;
    if (!encoded) return;
    const float high = log2_of(largest);
    low = arch::add(high, -kLogOctaves);
    if (smallest >= kLeastNormal) {
      const float log = log2_of(smallest);
      if (log > low) low = log;
    }
    step = (high - low) / kLogSteps;
    encoded = step > 0.0f;
  }
  // Rounds to the nearer code in the linear domain.
  DEEPEP_DEVICE float rounding() const {
    return 2.0f - log2_of(arch::multiply(arch::add(1.0f, exp2_of(step)), 0.5f)) / step;
  }
  DEEPEP_DEVICE uint32_t code(float magnitude, float rounding) const {
    if (magnitude < 1.17549435e-38f) return 0;
    const float at = arch::add((log2_of(magnitude) - low) / step, rounding);
    const float code = arch::floor_of(at);
    return code < 0.0f ? 0 : code > 511.0f ? 511 : static_cast<uint32_t>(code);
  }
  DEEPEP_DEVICE float value(uint32_t code) const {
    if (code == 0) return 0.0f;
    return exp2_of(arch::add(arch::multiply(static_cast<float>(code - 1), step), low));
  }
};

DEEPEP_DEVICE char* log_group(char* slot, int hidden, int group) {
  const int groups = (hidden + DEEPEP_FP8_GROUP - 1) / DEEPEP_FP8_GROUP;
  return slot + round_up(4 * groups, 16) + group * DEEPEP_FP8_GROUP * 2;
}

// Writes a BF16 row to a slot. By the whole team.
template <class Team>
DEEPEP_DEVICE void encode_row(Team team, const uint16_t* row, char* slot, int hidden) {
  for (int group = 0; group * DEEPEP_FP8_GROUP < hidden; ++group) {
    const uint16_t* from = row + group * DEEPEP_FP8_GROUP;
    const int left = hidden - group * DEEPEP_FP8_GROUP;
    const int count = left < DEEPEP_FP8_GROUP ? left : DEEPEP_FP8_GROUP;  // a multiple of 8
    uint32_t largest = 0, smallest = 0x7fff;  // BF16 magnitudes are ordered as their bits
    for (int i = team.lane(); i * kLogElements < count; i += team.size()) {
      for (int j = 0; j < kLogElements; ++j) {
        const uint32_t magnitude = from[i * kLogElements + j] & 0x7fff;
        if (magnitude > largest) largest = magnitude;
        if (magnitude < smallest) smallest = magnitude;
      }
    }
    largest = team.max(largest);
    smallest = 0x7fff - team.max(0x7fff - smallest);
    if (team.lane() == 0) reinterpret_cast<uint32_t*>(slot)[group] = largest | smallest << 16;
    const LogScale scale(arch::bits_to_float(largest << 16), arch::bits_to_float(smallest << 16));
    char* to = log_group(slot, hidden, group);
    const float rounding = scale.encoded ? scale.rounding() : 0.0f;
    for (int i = team.lane(); i * kLogElements < count; i += team.size()) {
      const uint16_t* x = from + i * kLogElements;
      if (!scale.encoded) {
        for (int j = 0; j < kLogElements; ++j) {
          reinterpret_cast<uint16_t*>(to)[i * kLogElements + j] = x[j];
        }
        continue;
      }
      uint32_t low = 0, rest = 0;
      for (int j = 0; j < kLogElements; ++j) {
        const uint32_t magnitude = x[j] & 0x7fffu, sign = x[j] >> 15;
        const uint32_t code = scale.code(arch::bits_to_float(magnitude << 16), rounding);
        low |= (code & 0xff) << (8 * j);
        rest |= code >> 8 << j | sign << (4 + j);
      }
      reinterpret_cast<uint32_t*>(to)[i] = low;
      reinterpret_cast<uint8_t*>(to)[count + i] = static_cast<uint8_t>(rest);
    }
  }
}

// Makes the slot's groups BF16 again, where they lie. By the whole team, one group after another: a
// lane's BF16 elements cover other lanes' codes.
template <class Team>
DEEPEP_DEVICE void decode_row(Team team, char* slot, int hidden) {
  for (int group = 0; group * DEEPEP_FP8_GROUP < hidden; ++group) {
    const int left = hidden - group * DEEPEP_FP8_GROUP;
    const int count = left < DEEPEP_FP8_GROUP ? left : DEEPEP_FP8_GROUP;
    const uint32_t extremes = reinterpret_cast<const uint32_t*>(slot)[group];
    const LogScale scale(arch::bits_to_float(extremes << 16),
                         arch::bits_to_float(extremes & 0xffff0000u));
    if (!scale.encoded) continue;
    char* at = log_group(slot, hidden, group);
    uint32_t low[arch::kLanesOfOne], rest[arch::kLanesOfOne];
    int n = 0;
    for (int i = team.lane(); i * kLogElements < count; i += team.size(), ++n) {
      low[n] = reinterpret_cast<const uint32_t*>(at)[i];
      rest[n] = reinterpret_cast<const uint8_t*>(at)[count + i];
    }
    team.sync();
    n = 0;
    for (int i = team.lane(); i * kLogElements < count; i += team.size(), ++n) {
      for (int j = 0; j < kLogElements; ++j) {
        const uint32_t code = (low[n] >> (8 * j) & 0xff) | (rest[n] >> j & 1) << 8;
        const uint16_t bits = arch::float_to_bf16(scale.value(code));
        reinterpret_cast<uint16_t*>(at)[i * kLogElements + j] =
            static_cast<uint16_t>(bits | (rest[n] >> (4 + j) & 1) << 15);
      }
    }
  }
}

}  // namespace deepep

#endif  // KERNELS_DEVICE_LOWLATENCY_LOGFMT_H_

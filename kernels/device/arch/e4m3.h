// FP8 e4m3 in plain arithmetic: the conversion where no instruction does it, and how a group's
// scale follows from its largest magnitude. The same bits on every architecture, and as in
// deepep/fp8.py.
#ifndef KERNELS_DEVICE_ARCH_E4M3_H_
#define KERNELS_DEVICE_ARCH_E4M3_H_

#include <cstdint>
#include <cstring>

namespace deepep::arch {

constexpr float kAmaxFloor = 1e-4f;  // so that no scale is zero
constexpr float kE4m3Max = 448.0f;

DEEPEP_ANYWHERE uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
DEEPEP_ANYWHERE float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds to nearest, ties to even; saturates to the largest finite value; NaN stays NaN.
DEEPEP_ANYWHERE uint8_t float_to_e4m3(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  // Normal results: 20 of 23 mantissa bits go, and the exponent's bias falls from 127 to 7.
  const uint32_t rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  const uint32_t normal = rounded - ((127 - 7) << 3);
  // Subnormal results count in steps of 2^-9, which is one unit in the last place of 2^14.
  const uint32_t subnormal = float_bits(bits_to_float(magnitude) + 16384.0f) - 0x46800000u;
  uint32_t code = magnitude < 0x3c800000u /* 2^-6 */ ? subnormal : normal;
  if (magnitude >= 0x43e00000u /* 448 */) code = 0x7e;
  if (magnitude > 0x7f800000u) code = 0x7f;
  return static_cast<uint8_t>(sign | code);
}

// What elements are multiplied by, and what is stored to multiply them back.
struct GroupScale {
  float factor, stored;

  DEEPEP_ANYWHERE GroupScale(float amax, bool rounded) {
    stored = amax * (1.0f / kE4m3Max);
    if (!rounded) {
      factor = kE4m3Max / amax;
      return;
    }
    // The next power of two; both are exact.
    const uint32_t bits = float_bits(stored);
    stored = bits_to_float(((bits >> 23) + ((bits & 0x7fffff) != 0)) << 23);
    factor = 1.0f / stored;
  }
};

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_E4M3_H_

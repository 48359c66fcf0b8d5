// BF16 to FP8 on a CUDA architecture: a warp casts a piece of a row, 16 elements a lane, from
// registers to registers. The names are those of host_choices.h; to_e4m3x2 is the architecture's.
#ifndef KERNELS_DEVICE_ARCH_CAST_CUH_
#define KERNELS_DEVICE_ARCH_CAST_CUH_

#include <cuda_bf16.h>

#include "kernels/abi/deepep_lowlatency.h"
#include "kernels/device/arch/cuda.cuh"
#include "kernels/device/arch/e4m3.h"

namespace deepep::arch {

DEEPEP_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
DEEPEP_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEEPEP_DEVICE float floor_of(float value) { return floorf(value); }
DEEPEP_DEVICE uint16_t float_to_bf16(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

constexpr int kCastPiece = 512;
constexpr int kLaneElements = kCastPiece / kWarpSize;
constexpr int kGroupLanes = DEEPEP_FP8_GROUP / kLaneElements;

// Two elements as two bytes, the first in the low one.
DEEPEP_DEVICE uint32_t to_e4m3x2(float low, float high);

class CastPiece {
 public:
  DEEPEP_DEVICE CastPiece(Team team, const uint16_t* from, int size, bool rounded) : size_(size) {
    const int begin = team.lane() * kLaneElements;
    uint4 words[2] = {};
    if (begin < size) {  // sizes are multiples of 16 elements
      const auto* source = reinterpret_cast<const uint4*>(from + begin);
      words[0] = load_once(source);
      words[1] = load_once(source + 1);
    }
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(words);
    float value[kLaneElements];
    float amax = kAmaxFloor;
#pragma unroll
    for (int i = 0; i < kLaneElements / 2; ++i) {
      const float2 pair = __bfloat1622float2(pairs[i]);
      value[2 * i] = pair.x;
      value[2 * i + 1] = pair.y;
      amax = fmaxf(amax, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
#pragma unroll
    for (int lanes = kGroupLanes / 2; lanes > 0; lanes /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
    }
    const GroupScale scale(amax, rounded);
    scale_ = float_bits(scale.stored);
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* v = value + 4 * i;
      packed[i] = to_e4m3x2(v[0] * scale.factor, v[1] * scale.factor) |
                  to_e4m3x2(v[2] * scale.factor, v[3] * scale.factor) << 16;
    }
    bytes_ = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }

  DEEPEP_DEVICE void store(Team team, char* place) const {
    const int begin = team.lane() * kLaneElements;
    if (begin < size_) store_once(reinterpret_cast<uint4*>(place + begin), bytes_);
  }
  DEEPEP_DEVICE uint32_t scale(int i) const {
    return __shfl_sync(kAllLanes, scale_, i * kGroupLanes);
  }
  DEEPEP_DEVICE uint32_t packed_scales() const {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kCastPiece / DEEPEP_FP8_GROUP; ++i) {
      const uint32_t exponent = scale(i) >> 23;
      if (i * DEEPEP_FP8_GROUP < size_) word |= exponent << (8 * i);
    }
    return word;
  }

 private:
  int size_;
  uint32_t scale_;  // of this lane's group
  uint4 bytes_;
};

}  // namespace deepep::arch

#endif  // KERNELS_DEVICE_ARCH_CAST_CUH_

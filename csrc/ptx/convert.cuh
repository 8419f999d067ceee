// SPDX-License-Identifier: Apache-2.0
// Conversions between float32 and the narrow types, one instruction each.
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

SPARGE_DEVICE float bf16_to_float(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

SPARGE_DEVICE float fp16_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

SPARGE_DEVICE u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

SPARGE_DEVICE u32 pack_fp16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Negative values become zero.
SPARGE_DEVICE u32 pack_fp16_relu(float low, float high) {
  u32 packed;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// a * b + c of both halves, rounded once.
SPARGE_DEVICE u32 fma_fp16(u32 a, u32 b, u32 c) {
  u32 pair;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

// For both halves of a pair: x * 0 + x is NaN for infinities, else x.
SPARGE_DEVICE u32 nan_if_infinite_bf16(u32 pair) {
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %1;" : "=r"(result) : "r"(pair), "r"(0));
  return result;
}
SPARGE_DEVICE u32 nan_if_infinite_fp16(u32 pair) { return fma_fp16(pair, 0, pair); }

// For both halves of a pair. A NaN loses against a number.
#define SPARGE_PAIRWISE(name, instruction)                         \
  SPARGE_DEVICE u32 name(u32 a, u32 b) {                           \
    u32 pair;                                                      \
    asm(instruction " %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b)); \
    return pair;                                                   \
  }
SPARGE_PAIRWISE(min_bf16, "min.bf16x2")
SPARGE_PAIRWISE(max_bf16, "max.bf16x2")
SPARGE_PAIRWISE(min_fp16, "min.f16x2")
SPARGE_PAIRWISE(max_fp16, "max.f16x2")
#undef SPARGE_PAIRWISE

// Four numbers, the first in the low byte, rounded to the nearest even and saturated to 0 .. 255; NaN is 0. Two a conversion from sm_86 on.
SPARGE_DEVICE u32 pack_u8(float first, float second, float third, float fourth) {
  i32 level[4];
  u32 upper, packed;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(level[0]) : "f"(first));
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(level[1]) : "f"(second));
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(level[2]) : "f"(third));
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(level[3]) : "f"(fourth));
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, 0;" : "=r"(upper) : "r"(level[3]), "r"(level[2]));
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(packed) : "r"(level[1]), "r"(level[0]), "r"(upper));
  return packed;
}

SPARGE_DEVICE float exp2_approx(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

#if SPARGE_ARCH >= 89
SPARGE_DEVICE u16 pack_e4m3(float low, float high) {
  u16 packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

SPARGE_DEVICE u16 e4m3_from_fp16(u32 pair) {
  u16 packed;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(packed) : "r"(pair));
  return packed;
}
#endif

}  // namespace sparge::ptx

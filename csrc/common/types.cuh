// SPDX-License-Identifier: Apache-2.0
// Fixed-width types and the constants that every stage shares. No toolkit headers: NVRTC ships none.
#pragma once

#define SPARGE_DEVICE __device__ __forceinline__

namespace sparge {

using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int kWarpSize = 32;
constexpr u32 kFullWarp = 0xFFFFFFFFu;

constexpr int kQueryBlock = 128;
constexpr int kKeyBlock = 64;
constexpr int kStepBlocks = 2;  // key blocks that attend takes at once on Hopper; lists make whole steps where they can
constexpr int kMapBits = 32;

// Largest V in units of its channel's scale: E4M3's maximum. FP16 V uses the same number, so one V scale serves all elements, and
// its smallest normal is 2^-23 of the largest.
constexpr float kValueLevels = 448.0f;
constexpr float kInt8Levels = 127.0f;  // largest level of INT8 Q, K and V
constexpr float kPoolValueStep =
    kValueLevels / kInt8Levels;              // of INT8 values of pooled keys whose scale is 1, in units of v_scale
constexpr float kLeastPoolScale = 0x1p-20f;  // of INT8 values of pooled keys
// Scale of a row or block of zeros, and least scale of any. So small that the offset of INT8 scores (attend/constants.cuh) rounds
// away, but not so small that the steps of logits become zero (attend/row_scale.cuh).
constexpr float kZeroScale = 0x1p-80f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000u);
constexpr float kNotANumber = __builtin_bit_cast(float, 0x7FFFFFFFu);

enum class DType : i32 { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

// What the two matrix products run on; numbers are sparge.kernels.spec.Element.
enum class Element : i32 { kInt8Fp16 = 0, kInt8E4M3 = 1, kBf16 = 2, kFp16 = 3, kInt8Int8 = 4 };

constexpr bool is_quantized(Element element) { return element != Element::kBf16 && element != Element::kFp16; }
constexpr int key_bytes(Element element) { return is_quantized(element) ? 1 : 2; }
constexpr int value_bytes(Element element) { return element == Element::kInt8E4M3 || element == Element::kInt8Int8 ? 1 : 2; }

template <typename T>
SPARGE_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
template <typename T>
SPARGE_DEVICE T smaller(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
SPARGE_DEVICE T larger(T a, T b) {
  return a > b ? a : b;
}

struct alignas(16) Vec16 {
  u32 x, y, z, w;
};
struct alignas(8) Vec8 {
  u32 x, y;
};

// Read back from the cubin by the host, which therefore repeats neither number.
struct LaunchInfo {
  u32 threads;
  u32 shared_bytes;
};

}  // namespace sparge

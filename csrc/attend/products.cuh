// SPDX-License-Identifier: Apache-2.0
// The two matrix products of a warp: 32 query rows with 64 keys, then with head_dim channels.
//
// Every element type sees the same bytes: a k-step is 32 bytes of a row, ldmatrix hands out its two 16-byte chunks.
#pragma once

#include "../ptx/convert.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "layout.cuh"

namespace sparge::attend {

// Scores of INT8 products leave the tensor cores as 1.5 * 2^23 + sum, read as float32: exact for |sum| < 2^22
// (127^2 * 128 = 2.06 million), and no conversion instruction is spent.
constexpr float kScoreZero = is_quantized(kElement) ? 12582912.0f : 0.0f;

using Scores = float[kRowTiles][kKeyTiles][4];
using Accumulators = float[kRowTiles][kChannelTiles][4];

constexpr int kKeySteps = kQueryRowBytes / 32;
constexpr int kValueSteps = kValueRowBytes / 32;
using Probabilities = u32[kRowTiles][kValueSteps][4];

// Where this lane points ldmatrix for rows row .. row + 15 of a tile: matrices 0 and 1 are the 16-byte chunk 2 step of
// the first and the second eight rows, 2 and 3 chunk 2 step + 1. As an A operand that is fragment a0..a3; as a B
// operand, columns 0-7 take (0, 2) and columns 8-15 take (1, 3). Swizzling is XOR, so steps differ by one XOR of the
// address and tiles may add multiples of 16 rows: one register addresses a whole tile, which must start at a multiple
// of its row size.
template <int kRowBytes>
SPARGE_DEVICE u32 lane_address(const u8* tile) {
  const u32 lane = threadIdx.x % kWarpSize;
  return ptx::shared_address(tile) + tile_offset<kRowBytes>(lane % 16, lane / 16);
}

template <int kRowBytes>
SPARGE_DEVICE void load_fragments(u32 (&fragment)[4], u32 lane_address, i32 row, i32 step) {
  ptx::ldmatrix_x4(fragment, (lane_address ^ (32 * step)) + row * kRowBytes);
}

SPARGE_DEVICE void multiply_scores(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kElement == Element::kBf16) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  } else if constexpr (kElement == Element::kFp16) {
    ptx::mma_m16n8k16_fp16(d, a, b0, b1);
  } else {
    u32 bits[4] = {__float_as_uint(d[0]), __float_as_uint(d[1]), __float_as_uint(d[2]), __float_as_uint(d[3])};
    ptx::mma_m16n8k32_s8(bits, a, b0, b1);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(bits[i]);
  }
}

SPARGE_DEVICE void score_block(Scores& scores, const u8* q_tile, const u8* k_tile) {
  const u32 q = lane_address<kQueryRowBytes>(q_tile + threadIdx.x / kWarpSize * kWarpRows * kQueryRowBytes);
  const u32 k = lane_address<kQueryRowBytes>(k_tile);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = kScoreZero;
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    u32 rows[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) load_fragments<kQueryRowBytes>(rows[m], q, 16 * m, step);
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      u32 columns[4];
      load_fragments<kQueryRowBytes>(columns, k, 8 * n, step);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply_scores(scores[m][n], rows[m], columns[0], columns[2]);
        multiply_scores(scores[m][n + 1], rows[m], columns[1], columns[3]);
      }
    }
  }
}

SPARGE_DEVICE u32 pack_probabilities(float low, float high) {
  return kElement == Element::kBf16 ? ptx::pack_bf16(low, high) : ptx::pack_fp16(low, high);
}

// Scores are consumed: the accumulator fragments of QK become the A fragments of PV without a shuffle.
SPARGE_DEVICE void pack_block(Probabilities& p, const Scores& s) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          u32& fragment = p[m][step][2 * chunk + half];
#if SPARGE_ARCH >= 89
          if constexpr (kElement == Element::kInt8E4M3) {
            const auto& left = s[m][4 * step + 2 * chunk];
            const auto& right = s[m][4 * step + 2 * chunk + 1];
            fragment = ptx::pack_e4m3(left[2 * half], left[2 * half + 1]) |
                       static_cast<u32>(ptx::pack_e4m3(right[2 * half], right[2 * half + 1])) << 16;
            continue;
          }
#endif
          const auto& tile = s[m][2 * step + chunk];
          fragment = pack_probabilities(tile[2 * half], tile[2 * half + 1]);
        }
}

SPARGE_DEVICE void multiply_values(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if SPARGE_ARCH >= 89
  if constexpr (kElement == Element::kInt8E4M3) {
    ptx::mma_m16n8k32_e4m3(d, a, b0, b1);
    return;
  }
#endif
  if constexpr (kElement == Element::kBf16)
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  else
    ptx::mma_m16n8k16_fp16(d, a, b0, b1);
}

// E4M3 tensor cores keep about 14 bits while they add, so each block is summed apart and promoted to float32
// accumulators, which takes the rescaling along; the 16-bit products accumulate in place.
constexpr bool kTwoLevel = kElement == Element::kInt8E4M3;
using Rescale = float[kRowTiles][2];

SPARGE_DEVICE void add_values(Accumulators& out, const Probabilities& p, const u8* v_tile, const Rescale& alpha) {
  const u32 v = lane_address<kValueRowBytes>(v_tile);
#pragma unroll
  for (int n = 0; n < kChannelTiles; n += 2) {
    float fresh[kRowTiles][2][4] = {};
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      u32 columns[4];
      load_fragments<kValueRowBytes>(columns, v, 8 * n, step);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply_values(kTwoLevel ? fresh[m][0] : out[m][n], p[m][step], columns[0], columns[2]);
        multiply_values(kTwoLevel ? fresh[m][1] : out[m][n + 1], p[m][step], columns[1], columns[3]);
      }
    }
    if constexpr (kTwoLevel) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int side = 0; side < 2; ++side)
#pragma unroll
          for (int i = 0; i < 4; ++i) out[m][n + side][i] = out[m][n + side][i] * alpha[m][i / 2] + fresh[m][side][i];
    }
  }
}

}  // namespace sparge::attend

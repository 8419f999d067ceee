// SPDX-License-Identifier: Apache-2.0
// The two matrix products of a warp: its query rows with 64 keys, then with head_dim channels.
//
// Every element type sees the same bytes: a k-step is 32 bytes of a row, ldmatrix hands out its two 16-byte chunks.
#pragma once

#include "../common/key_tile.cuh"
#include "../ptx/convert.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/schedule.cuh"
#include "constants.cuh"
#include "layout.cuh"

namespace sparge::attend {

using PerRow = float[kRowTiles][2];  // one number for each of a thread's rows
using Scores = float[kRowTiles][kKeyTiles][4];
using Accumulators = float[kRowTiles][kChannelTiles][4];

constexpr int kKeySteps = kQueryRowBytes / 32;
constexpr int kValueSteps = kValueRowBytes / 32;
using Probabilities = u32[kRowTiles][kValueSteps][4];
using QueryFragments = u32[kRowTiles][kKeySteps][4];

// Address at which this lane points ldmatrix for sixteen rows of a tile and both 16-byte chunks of a k-step. The four matrices
// come out in the order in which the operand wants them in neighbouring registers (docs/experiments.md, "Order of ldmatrix"):
// A takes both halves of the rows, then the second chunk; B takes both chunks of eight columns, then the other eight columns.
// Swizzling is XOR. So a k-step is one XOR of the address, multiples of 16 rows are immediate offsets, and one register addresses
// a whole tile, which must start at a multiple of its row size.
// The thread index is read where it is used: else the XORs of all k-steps are kept across the main loop.
enum class Operand { kA, kB };

template <int kRowBytes, Operand kOperand>
SPARGE_DEVICE u32 lane_address(const u8* tile) {
  const u32 lane = ptx::thread_index() % kWarpSize;
  const u32 row = kOperand == Operand::kA ? lane % 16 : lane / 16 * 8 + lane % 8;
  const u32 chunk = kOperand == Operand::kA ? lane / 16 : lane / 8 % 2;
  return ptx::shared_address(tile) + tile_offset<kRowBytes>(row, chunk);
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

SPARGE_DEVICE u32 query_address(const u8* q_tile) {
  const i32 warp = ptx::thread_index() / kWarpSize;
  return lane_address<kQueryRowBytes, Operand::kA>(q_tile + warp * kWarpRows * kQueryRowBytes);
}

// All fragments of the warp's rows where they stay in registers.
SPARGE_DEVICE void keep_queries(QueryFragments& fragments, const u8* q_tile) {
  if constexpr (!kQueriesInRegisters) return;
  const u32 q = query_address(q_tile);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) load_fragments<kQueryRowBytes>(fragments[m][step], q, 16 * m, step);
}

// Where this lane reads the tiles of K and V. Kept across the main loop where there is room, else computed afresh.
class LaneAddresses {
  u32 k, v;  // of the first stage

 public:
  SPARGE_DEVICE explicit LaneAddresses(const Smem& smem) : k(of_keys(smem.k[0])), v(of_values(smem.v[0])) {}
  SPARGE_DEVICE u32 keys(const Smem& smem, i32 slot) const {
    return kAddressesInRegisters ? ptx::opaque(k) + slot * kKeyTileBytes : of_keys(smem.k[slot]);
  }
  SPARGE_DEVICE u32 values(const Smem& smem, i32 slot) const {
    return kAddressesInRegisters ? ptx::opaque(v) + slot * kValueTileBytes : of_values(smem.v[slot]);
  }

 private:
  SPARGE_DEVICE static u32 of_keys(const u8* tile) { return lane_address<kKeyPartRowBytes, Operand::kB>(tile); }
  SPARGE_DEVICE static u32 of_values(const u8* tile) { return lane_address<kValueRowBytes, Operand::kB>(tile); }
};

// `k`: the lane's address in the tile of K.
SPARGE_DEVICE void score_block(Scores& scores, const QueryFragments& kept, const u8* q_tile, u32 k) {
  const u32 q = query_address(q_tile);
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
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (kQueriesInRegisters)
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[m][i] = kept[m][step][i];
      else
        load_fragments<kQueryRowBytes>(rows[m], q, 16 * m, step);
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      u32 columns[4];
      constexpr int kPartSteps = kKeySteps / kKeyParts;
      load_fragments<kKeyPartRowBytes>(columns, k + step / kPartSteps * (kKeyBlock * kKeyPartRowBytes), 8 * n, step % kPartSteps);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        multiply_scores(scores[m][n], rows[m], columns[0], columns[1]);
        multiply_scores(scores[m][n + 1], rows[m], columns[2], columns[3]);
      }
    }
  }
}

SPARGE_DEVICE u32 pack_probabilities(float low, float high) {
  return kElement == Element::kBf16 ? ptx::pack_bf16(low, high) : ptx::pack_fp16(low, high);
}

// Shift in levels of P of keys 8, 10, 12 and 14 of each sixteen, before it is rounded to the nearest: +0.48 in even sixteens of
// a block, -0.48 in odd ones. So 8 keys of a block round up from 0.02 of a level on, 8 from 0.98, 48 from 0.5, and sums of many
// small P are right on average (docs/experiments.md, "Rounding of integer P").
SPARGE_DEVICE constexpr float rounding_shift(int sixteen) { return sixteen % 2 ? -0.48f : 0.48f; }

// Scores of a row tile are consumed: the accumulator fragments of QK become the A fragments of PV without a shuffle.
SPARGE_DEVICE void pack_row_tile(Probabilities& p, const Scores& s, i32 m) {
#pragma unroll
  for (int step = 0; step < kValueSteps; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        u32& fragment = p[m][step][2 * chunk + half];
        if constexpr (kIntegerValues) {
          const auto& left = s[m][4 * step + 2 * chunk];
          const auto& right = s[m][4 * step + 2 * chunk + 1];
          const float shifted = right[2 * half] + rounding_shift(2 * step + chunk);
          fragment = ptx::pack_u8(left[2 * half], left[2 * half + 1], shifted, right[2 * half + 1]);
          continue;
        }
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

// Sums a block apart for each row tile and eight channels: `multiply` adds the products of a step to four sums, and `add` takes the
// sums, the row tile and the channel tile.
template <typename Sum, typename Multiply, typename Add>
SPARGE_DEVICE void sum_apart(const Probabilities& p, i32 n, u32 v, Multiply&& multiply, Add&& add) {
  u32 columns[kValueSteps][4];
#pragma unroll
  for (int step = 0; step < kValueSteps; ++step) load_fragments<kValueRowBytes>(columns[step], v, 8 * n, step);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      Sum fresh[4] = {};
#pragma unroll
      for (int step = 0; step < kValueSteps; ++step)
        multiply(fresh, p[m][step], columns[step][2 * side], columns[step][2 * side + 1]);
      add(fresh, m, n + side);
    }
}

#if SPARGE_ARCH >= 89
// E4M3 tensor cores keep about 14 bits while they add: each block is summed apart and promoted to float32.
SPARGE_DEVICE void add_promoted(Accumulators& out, const Probabilities& p, i32 n, u32 v) {
  sum_apart<float>(
      p, n, v, [](float (&d)[4], const u32(&a)[4], u32 b0, u32 b1) { ptx::mma_m16n8k32_e4m3(d, a, b0, b1); },
      [&](const float (&fresh)[4], int m, int channel_tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][channel_tile][i] += fresh[i];
      });
}
#endif

// Sums of a block are integers, exact: |sum| <= 64 x 255 x 127 < 2^24. The row's factor brings them to the accumulators' units.
SPARGE_DEVICE void add_integers(Accumulators& out, const Probabilities& p, i32 n, u32 v, const PerRow& factor) {
  sum_apart<u32>(
      p, n, v, [](u32(&d)[4], const u32(&a)[4], u32 b0, u32 b1) { ptx::mma_m16n8k32_u8_s8(d, a, b0, b1); },
      [&](const u32(&fresh)[4], int m, int channel_tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = out[m][channel_tile][i];
          sum = __fmaf_rn(__int2float_rn(static_cast<i32>(fresh[i])), factor[m][i / 2], sum);
        }
      });
}

// 16-bit products accumulate in place.
SPARGE_DEVICE void add_in_place(Accumulators& out, const Probabilities& p, i32 n, u32 v) {
  auto multiply = [](float (&d)[4], const u32(&a)[4], u32 b0, u32 b1) {
    kElement == Element::kBf16 ? ptx::mma_m16n8k16_bf16(d, a, b0, b1) : ptx::mma_m16n8k16_fp16(d, a, b0, b1);
  };
#pragma unroll
  for (int step = 0; step < kValueSteps; ++step) {
    u32 columns[4];
    load_fragments<kValueRowBytes>(columns, v, 8 * n, step);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      multiply(out[m][n], p[m][step], columns[0], columns[1]);
      multiply(out[m][n + 1], p[m][step], columns[2], columns[3]);
    }
  }
}

SPARGE_DEVICE void scale_rows(PerRow& rows, float factor) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[m][half] *= factor;
}

// Channel tiles after which reads of V start anew with integer values: else ptxas has so many under way that it spills.
constexpr int kValuesAtOnce = 4;

// `v`: the lane's address in the tile of V. `factor` of each row counts with integer values alone.
SPARGE_DEVICE void add_values(Accumulators& out, const Probabilities& p, u32 v, const PerRow& factor) {
#pragma unroll
  for (int n = 0; n < kChannelTiles; n += 2) {
    if constexpr (kIntegerValues) {
      if (n > 0 && n % kValuesAtOnce == 0) __syncwarp();
      add_integers(out, p, n, v, factor);
      continue;
    }
#if SPARGE_ARCH >= 89
    if constexpr (kElement == Element::kInt8E4M3) {
      add_promoted(out, p, n, v);
      continue;
    }
#endif
    add_in_place(out, p, n, v);
  }
}

}  // namespace sparge::attend

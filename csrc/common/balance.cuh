// SPDX-License-Identifier: Apache-2.0
// Q and K on the way to INT8, in heads with channels of K that are far larger than the others: channels are balanced, and each
// eight neighbours are rotated, which their product does not see.
//
//     Q' = H (Q b),  K' = H (K / 8b),  Q'.K' = Q.K,  b near sqrt(extent of the channel in K),  H: Hadamard matrix of eight, H H = 8
//
// A row of Q or a block of K has one step for all channels: one that is large costs the others their levels. No mean removes a
// channel that fluctuates. Balancing takes the root of how much it differs from the others, rotating shares the rest among eight.
// b is a power of two: exact, and found by few instructions, as every thread block that quantizes keys finds it anew. Other heads
// stay as they are, as their short calls would take a tenth longer.
// Tried       docs/experiments.md, "Channels that differ".
#pragma once

#include "chunks.cuh"
#include "reduce.cuh"

namespace sparge {

// Root of the largest extent over the mean of all roots, from which on a head is balanced: an extent three times the others'.
constexpr float kLeastExcess = 1.6f;
// Root of a channel's extent relative to the largest: keys that were not sampled may be larger than it tells.
constexpr float kLeastRoot = 0.125f;
// Balance of heads that stay as they are.
constexpr float kNoBalance = 0.0f;

// Within 6 %, of a number that is not negative: half its exponent, and half its mantissa.
SPARGE_DEVICE float rough_root(float x) { return __uint_as_float((__float_as_uint(x) >> 1) + 0x1FC00000u); }
SPARGE_DEVICE float nearest_power_of_two(float x) { return __uint_as_float((__float_as_uint(x) + 0x00400000u) & 0x7F800000u); }
// Factor of a channel of K: 1 / 8b.
SPARGE_DEVICE float key_factor(float balance) { return __uint_as_float(0x7D800000u - __float_as_uint(balance)); }

// From the extents of neighbouring channels, a lane's each, to their balance; by one warp. count: channels that are no padding,
// whose extent is 0. Extents that are no numbers may give any balance, as all rows of such a head are NaN.
template <int kLaneShare>
SPARGE_DEVICE void balance_channels(float (&channel)[kLaneShare], i32 count) {
  float most = 0.0f, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i) {
    channel[i] = rough_root(channel[i]);
    most = fmaxf(most, channel[i]), sum += channel[i];
  }
  most = lane_max<1, kWarpSize>(most), sum = lane_sum<1, kWarpSize>(sum);
  const bool balances = most * static_cast<float>(count) > kLeastExcess * sum;
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i)
    channel[i] = balances ? nearest_power_of_two(fmaxf(channel[i], most * kLeastRoot)) : kNoBalance;
}

SPARGE_DEVICE void add_and_subtract(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// Eight neighbouring channels of one thread.
SPARGE_DEVICE void rotate(float (&x)[8]) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (!(i & step)) add_and_subtract(x[i], x[i + step]);
}

// Neighbouring channels of a lane, whose neighbours have the rest of the eight.
template <int kLaneShare>
SPARGE_DEVICE void rotate_lanes(float (&x)[kLaneShare], i32 lane) {
#pragma unroll
  for (int step = 1; step < kLaneShare; step *= 2)
#pragma unroll
    for (int i = 0; i < kLaneShare; ++i)
      if (!(i & step)) add_and_subtract(x[i], x[i + step]);
#pragma unroll
  for (int step = 1; step < 8 / kLaneShare; step *= 2)
#pragma unroll
    for (int i = 0; i < kLaneShare; ++i) {
      const float other = __shfl_xor_sync(kFullWarp, x[i], step);
      x[i] = lane & step ? other - x[i] : x[i] + other;
    }
}

// As rotate, of channels times `factor`.
template <typename Float>
SPARGE_DEVICE void scale_and_rotate(float (&x)[8], Float* factor) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= factor[i];
  rotate(x);
}

// Balances and rotates eight channels of a query, and keeps them in bf16: about 1 % more error than float32. A warp that has no
// registers for them reads them again.
template <DType kType, typename Float>
SPARGE_DEVICE void rotate_queries(Chunk& chunk, Float* balance) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; i += 2) unpack_pair(kType, chunk.word[i / 2], x[i], x[i + 1]);
  scale_and_rotate(x, balance);
#pragma unroll
  for (int i = 0; i < 8; i += 2) chunk.word[i / 2] = ptx::pack_bf16(x[i], x[i + 1]);
}

}  // namespace sparge

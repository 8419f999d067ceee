// SPDX-License-Identifier: Apache-2.0
// What attention over block means alone would give: sums of V means by each row's share of the mass.
#pragma once

#include "product.cuh"

namespace sparge::route {

constexpr int kKeyGroups = 4;  // of warps, which take turns at steps of kKeyStep key blocks
constexpr int kChannelGroups = kWarps / kKeyGroups;
constexpr int kKeyStep = 8;
constexpr int kTiles = kHeadDim / kChannelGroups / kTileColumns;  // that a warp multiplies with the weights it has split once

// A group of warps adds up its key blocks here; the four sums of a number lie where its parts in both vectors will.
SPARGE_DEVICE u32* partial_sums(Vectors& one, Vectors& other, i32 key_group) {
  Vectors& vectors = key_group < 2 ? one : other;
  return key_group % 2 ? vectors.low : vectors.high;
}

SPARGE_DEVICE float sum_of_groups(Vectors& one, Vectors& other, i32 row, i32 channel) {
  const i32 place = Vectors::place(row, channel);
  float sum = 0.0f;
#pragma unroll
  for (int group = 0; group < kKeyGroups; ++group) sum += __uint_as_float(partial_sums(one, other, group)[place]);
  return sum;
}

// Partial sums of weights[r][j] V_j, weights `pitch` apart. Tile t has channel t of every kTiles, so that a lane loads neighbours,
// and neighbouring key blocks, whose weights it loads together. Weights lie in `other`.
SPARGE_DEVICE void pool_outputs(const float* values, const float* weights, i32 pitch, Vectors& one, Vectors& other, i32 rows,
                                i32 key_blocks) {
  const i32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, group = lane / 4, quad = lane % 4;
  const i32 key_group = warp / kChannelGroups, first_channel = warp % kChannelGroups * kTiles * kTileColumns;
  const float* channels = values + first_channel + kTiles * group;
  const float* row[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) row[h] = weights + smaller(8 * h + group, rows - 1) * pitch + 2 * quad;
  float sum[kTiles][4] = {}, x[2][2][kTiles];
  auto load = [&](float (&two)[2][kTiles], i32 start) {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_floats(two[i], channels + smaller(start + 2 * quad + i, key_blocks - 1) * kHeadDim);
  };
  load(x[0], kKeyStep * key_group);
#pragma unroll 1
  for (i32 turn = kKeyStep * key_group; turn < key_blocks; turn += 2 * kKeyStep * kKeyGroups)
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const i32 start = turn + step * kKeyStep * kKeyGroups;
      if (start >= key_blocks) continue;
      load(x[1 - step], start + kKeyStep * kKeyGroups);
      Split a[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float two[2];
        load_floats(two, row[h] + start);
        a[h] = split(two[0]), a[2 + h] = split(two[1]);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) multiply_add(sum[tile], a, split(x[step][0][tile]), split(x[step][1][tile]));
    }
  __syncthreads();
  u32* sums = partial_sums(one, other, key_group);
#pragma unroll
  for (int i = 0; i < 2 * kTiles; i += 2) {
    const float (&even)[4] = sum[i % kTiles], (&odd)[4] = sum[i % kTiles + 1];
    const i32 c = i / kTiles;
    *reinterpret_cast<Vec16*>(sums + Vectors::place(group, first_channel + 2 * kTiles * quad + i)) = {
        __float_as_uint(even[c]), __float_as_uint(even[2 + c]), __float_as_uint(odd[c]), __float_as_uint(odd[2 + c])};
  }
}

}  // namespace sparge::route

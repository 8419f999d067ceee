// SPDX-License-Identifier: Apache-2.0
// Where a 16-byte chunk of a row of K (or of Q, for the tensor cores of sm_90a) lies in its tile.
//
// The warpgroup tensor cores swizzle rows of 128 bytes at most. On sm_90a wider rows are cut in two: a tile of their first halves
// comes before one of their second halves. Elsewhere rows are whole.
#pragma once

#include "config.cuh"
#include "swizzle.cuh"

namespace sparge {

constexpr int kKeyRowBytes = kHeadDim * key_bytes(kElement);
constexpr int kKeyParts = kArch == 90 && kKeyRowBytes > 128 ? 2 : 1;
constexpr int kKeyPartRowBytes = kKeyRowBytes / kKeyParts;

template <int kRows>
SPARGE_DEVICE u32 key_offset(u32 row, u32 chunk) {
  if constexpr (kKeyParts == 1) {
    return tile_offset<kKeyRowBytes>(row, chunk);
  } else {
    constexpr u32 kPartChunks = kKeyPartRowBytes / 16;
    return chunk / kPartChunks * (kRows * kKeyPartRowBytes) + tile_offset<kKeyPartRowBytes>(row, chunk % kPartChunks);
  }
}

}  // namespace sparge

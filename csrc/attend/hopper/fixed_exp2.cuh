// SPDX-License-Identifier: Apache-2.0
// P of two scores at once, from fixed point to E4M3 by packed half arithmetic: MUFU would take 16 clocks of a warp for them.
//
// w = 64 (x + kFixedShift), rounded to an integer. Read as a half, 16 w is 2^(w/64 - 15), but with a mantissa that is linear in
// x. P is the mean of two such halves, half an octave apart. It errs by -1.5 to +1.1 % before E4M3 rounds it
// (docs/experiments.md, "Error of P in fixed point"), and is monotonic in x. Below 2^-10 it is 0. A logit at the maximum gives
// 450, which saturates at 448, as does what rounding lifts above it. tests/oracle/fixed_exp2.py computes the same.
#pragma once

#include "../../ptx/convert.cuh"
#include "layout.cuh"

namespace sparge::hopper {

// Key tiles of a block that get their P so, a bit each: as many as make MUFU, which computes the others, and the issue of
// instructions about equally busy (docs/experiments.md, "P in fixed point").
constexpr u32 kFixedTiles = 0x5B;
SPARGE_DEVICE constexpr bool is_fixed(int tile) { return kFixedTiles >> tile & 1; }

// An octave is 64 steps of 2^-24, the smallest half: below 2^-13 the bits of a half count them.
constexpr float kFixedUnit = 0x1p-18f;

// 14 less 0.0574, as both halves together are 1.0406 (2^0.0574) times 2^(x + kFixedShift - 14) in the mean.
constexpr float kFixedShift = 13.942620f;

// Exponents of the probabilities of one block, by key tile and row.
struct Exponents {
  u32 fixed[kKeyTiles][2];       // both columns of this thread: w
  float exact[kKeyTiles][2][2];  // of tiles that MUFU computes
};

// From two w to P.
SPARGE_DEVICE u32 fixed_exp2(u32 pair) {
  constexpr u32 kHalfOctave = 0x02000200;  // 16 * 32
  constexpr u32 kRootHalf = 0x39A839A8;    // 2^-0.5
  const u32 linear = pair * 16;            // w < 2^11: nothing passes from one half to the other
  return ptx::fma_fp16(linear + kHalfOctave, kRootHalf, linear);
}

}  // namespace sparge::hopper

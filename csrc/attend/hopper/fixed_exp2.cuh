// SPDX-License-Identifier: Apache-2.0
// P of two scores at once, from fixed point to E4M3 by packed half arithmetic: MUFU would take 16 clocks of a warp for them.
//
// 64 (x + kFixedShift), rounded, is an integer w whose 16-fold, read as a half, is 2^(w/64 - 15) but for its mantissa, which is
// linear in x: too large by 0 to 6 %. The mean of two such halves, half an octave apart, errs by -1.0 to +.5 % around its own
// mean. Rounding w adds .54 % either way: -1.5 to +1.1 %, before E4M3 rounds by up to 6.25 %. Over an octave P has an rms error
// of 2.71 % (2.66 % where 2^x itself is rounded) and a mean one of -.07 % (the same). P is monotonic in x. Below 2^-10 it is 0;
// a logit at the maximum gives 450, which saturates at 448, and so does what rounding lifts above.
// sparge/reference/fixed_exp2.py is this, written from the maths.
#pragma once

#include "../../ptx/convert.cuh"
#include "layout.cuh"

namespace sparge::hopper {

// Which key tiles of a block get their P so, a bit each: as many as leave MUFU, which computes the others, and the issue of
// instructions about equally busy (attend_hopper.cu, Tried).
constexpr u32 kFixedTiles = 0x5B;
SPARGE_DEVICE constexpr bool is_fixed(int tile) { return kFixedTiles >> tile & 1; }

// An octave is 64 steps of 2^-24, the smallest half: below 2^-13 the bits of a half count them.
constexpr float kFixedUnit = 0x1p-18f;

// Both halves together are 1.0406 (log2 .0574) times 2^(x + kFixedShift - 14) in the mean; that is left out of 14.
constexpr float kFixedShift = 13.942620f;

// Exponents of the probabilities of one block, by key tile and row.
struct Exponents {
  u32 fixed[kKeyTiles][2];       // both columns of this thread: w
  float exact[kKeyTiles][2][2];  // where MUFU computes them
};

// Two w to about 2^x.
SPARGE_DEVICE u32 fixed_exp2(u32 pair) {
  constexpr u32 kHalfOctave = 0x02000200;  // 16 * 32
  constexpr u32 kRootHalf = 0x39A839A8;    // 2^-.5
  const u32 linear = pair * 16;            // w < 2^11: nothing passes from one half to the other
  return ptx::fma_fp16(linear + kHalfOctave, kRootHalf, linear);
}

}  // namespace sparge::hopper

// SPDX-License-Identifier: Apache-2.0
// Special registers read afresh, and how many registers a warpgroup owns.
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

// threadIdx.x, but volatile: what is computed from it is not kept in registers across the kernel. Its range spares a signed
// division by a power of two, which takes more values.
SPARGE_DEVICE i32 thread_index() {
  i32 index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  __builtin_assume(index >= 0 && index < 1024);
  return index;
}

#if SPARGE_ARCH == 90
// A warpgroup changes how many registers its threads own.
template <int kCount>
SPARGE_DEVICE void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
SPARGE_DEVICE void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
#endif

// A NaN wins; fmaxf and fminf prefer the number.
SPARGE_DEVICE float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}
SPARGE_DEVICE float min_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}

// Maxima of two unsigned halves each.
SPARGE_DEVICE u32 max_of_halves(u32 a, u32 b) {
  u32 most;
  asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

SPARGE_DEVICE float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Errs by at most 2^-22, absolute between 0.5 and 2, relative elsewhere.
SPARGE_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

SPARGE_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace sparge::ptx

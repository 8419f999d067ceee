// SPDX-License-Identifier: Apache-2.0
// Tell the compilers where to compute values that later code needs: both move work towards its use, past barriers and waits.
#pragma once

#include "cp_async.cuh"

namespace sparge::ptx {

// No instruction: keeps LLVM from moving what computes the values into the basic block that uses them.
template <int kCount>
SPARGE_DEVICE void compute_here(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i]));
}

// The same value, of which the compilers know nothing: what is computed from it is not kept across a loop.
SPARGE_DEVICE u32 opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Keeps the computation of both numbers before a wait or barrier that follows, as ptxas does not move the store past it.
SPARGE_DEVICE void store_if_nan(u32& place, float first, float second) {
  asm volatile(
      "{\n"
      ".reg .pred nan;\n"
      "setp.nan.f32 nan, %0, %1;\n"
      "@nan st.volatile.shared.u32 [%2], 0;\n"
      "}\n" ::"f"(first),
      "f"(second), "r"(shared_address(&place))
      : "memory");
}

// From global memory. The load starts where it stands, and nothing waits for it before its value is used.
SPARGE_DEVICE u16 load_ahead(const u16* at) {
  u16 value;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(at));
  return value;
}

// Two neighbours from global memory that nobody writes while the kernel runs: such loads may move before stores.
SPARGE_DEVICE void load_constant(float& low, float& high, const float* at) {
  asm("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(low), "=f"(high) : "l"(at));
}

}  // namespace sparge::ptx

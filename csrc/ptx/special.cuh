// SPDX-License-Identifier: Apache-2.0
// Special registers read afresh.
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

// threadIdx.x, but volatile: what is computed from it is not kept in registers across the kernel.
SPARGE_DEVICE i32 thread_index() {
  i32 index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace sparge::ptx

// SPDX-License-Identifier: Apache-2.0
// Four 8x8 matrices of 16-bit elements from fragments into shared memory (sm_90).
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

SPARGE_DEVICE void stmatrix_x4(u32 address, const u32 (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

}  // namespace sparge::ptx

// SPDX-License-Identifier: Apache-2.0
// Four 8x8 matrices of 16-bit elements (or 8x16 of bytes) from shared memory into fragments.
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

SPARGE_DEVICE void ldmatrix_x4(u32 (&fragment)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address));
}

}  // namespace sparge::ptx

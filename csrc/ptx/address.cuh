// SPDX-License-Identifier: Apache-2.0
// Addresses that the compilers would else add up from their parts at every load.
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

// Row `index` of rows in global memory, in one instruction.
SPARGE_DEVICE const char* global_row(const char* first, u32 index, u32 row_bytes) {
  const char* row;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(row) : "r"(index), "r"(row_bytes), "l"(first));
  __builtin_assume(__isGlobal(row));
  return row;
}

}  // namespace sparge::ptx

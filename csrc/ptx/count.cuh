// SPDX-License-Identifier: Apache-2.0
// Counting under a condition.
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

// One instruction beside the comparison; of a sum in C++ ptxas makes two.
SPARGE_DEVICE void count_from(u32 least, u32 key, u32& number) {
  asm("{ .reg .pred p; setp.ge.u32 p, %1, %2; @p add.u32 %0, %0, 1; }" : "+r"(number) : "r"(key), "r"(least));
}

}  // namespace sparge::ptx

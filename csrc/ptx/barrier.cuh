// SPDX-License-Identifier: Apache-2.0
// Named barriers over part of a block, with a vote.
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

// True when `vote` is true in each of the kCount threads that meet at barrier kId.
template <int kId, int kCount>
SPARGE_DEVICE bool barrier_all(bool vote) {
  u32 all;
  asm volatile(
      "{\n"
      ".reg .pred mine, everyone;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "barrier.cta.red.and.pred everyone, %2, %3, mine;\n"
      "selp.u32 %0, 1, 0, everyone;\n"
      "}\n"
      : "=r"(all)
      : "r"(static_cast<u32>(vote)), "n"(kId), "n"(kCount)
      : "memory");
  return all != 0;
}

}  // namespace sparge::ptx

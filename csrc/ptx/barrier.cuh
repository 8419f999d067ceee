// SPDX-License-Identifier: Apache-2.0
// Named barriers over part of a block, with a vote.
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

// True when `vote` is true in each of the `threads` threads that meet at barrier `id`.
SPARGE_DEVICE bool barrier_all(int id, int threads, bool vote) {
  u32 all;
  asm volatile(
      "{\n"
      ".reg .pred mine, everyone;\n"
      "setp.ne.u32 mine, %3, 0;\n"
      "barrier.cta.red.and.pred everyone, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, everyone;\n"
      "}\n"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<u32>(vote))
      : "memory");
  return all != 0;
}

}  // namespace sparge::ptx

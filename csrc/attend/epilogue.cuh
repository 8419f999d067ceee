// SPDX-License-Identifier: Apache-2.0
// What the main loop leaves in registers and shared memory, written out.
#pragma once

#include "softmax.cuh"
#include "store.cuh"

namespace sparge::attend {

SPARGE_DEVICE void store_facts(const AttendParams& p, const Work& work, const Smem& smem, const Softmax& softmax) {
  if (threadIdx.x % 4 != 0) return;
  for (int m = 0; m < kRowTiles; ++m)
    for (int half = 0; half < 2; ++half) {
      const i32 row = first_row() + row_step(m, half), token = work.token(p.problem, row);
      if (token < 0) continue;
      store_row_facts(p, work, token, softmax.max.at(m, half, threadIdx.x), softmax.sum.at(m, half, threadIdx.x), [&]() -> QueryFacts {
        if constexpr (!is_quantized(kElement)) return {};
        return {p.lse ? smem.q_dot_mean[row] : 0.0f, smem.q_scale[kRows + row]};
      });
    }
}

// One row after another, so that a single row address is alive beside the accumulators.
SPARGE_DEVICE void store_output(const AttendParams& p, const Work& work, const Accumulators& out, const Softmax& softmax) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 token = work.token(p.problem, first_row() + row_step(m, half));
      if (token < 0) continue;
      const RowStore at(p, work, token, softmax.sum.at(m, half, threadIdx.x));
#pragma unroll
      for (int n = 0; n < kChannelTiles; ++n) at.store(8 * n + threadIdx.x % 4 * 2, out[m][n][2 * half], out[m][n][2 * half + 1]);
    }
}

}  // namespace sparge::attend

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
      store_row_facts(p, work, token, softmax.max.at(m, half, threadIdx.x), softmax.sum.at(m, half, threadIdx.x),
                      [&]() -> QueryFacts {
                        if constexpr (!is_quantized(kElement)) return {};
                        return {p.lse ? smem.q_dot_mean[row] : 0.0f, smem.q_scale[kRows + row]};
                      });
    }
}

// One row after another, so that a single row address is alive beside the accumulators.
SPARGE_DEVICE void store_pairs(const AttendParams& p, const Work& work, const Accumulators& out, const Softmax& softmax) {
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

// Four lanes share a row and have pairs of its channels. They exchange them, four tiles at a time: 16 neighbouring bytes a lane.
template <DType kType>
SPARGE_DEVICE void store_whole_rows(const AttendParams& p, const Work& work, const Accumulators& out, const Softmax& softmax) {
  const i32 quad_lane = ptx::thread_index() % 4;
  Value low[kChannelTiles], high[kChannelTiles];  // all at once: one wait
#pragma unroll
  for (int n = 0; n < kChannelTiles; ++n) load_value_pair(low[n], high[n], p, work.kv_at, 8 * n + 2 * quad_lane);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 token = work.token(p.problem, first_row() + row_step(m, half));
      const RowStore row(p, work, token, softmax.sum.at(m, half, threadIdx.x));
#pragma unroll
      for (int first = 0; first < kChannelTiles; first += 4) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* sums = out[m][first + i] + 2 * half;
          word[i] = row.packed<kType>(sums[0], sums[1], low[first + i], high[first + i]);
        }
        transpose_quad(word, quad_lane);
        if (token >= 0) reinterpret_cast<Vec16*>(row.out)[first + quad_lane] = {word[0], word[1], word[2], word[3]};
      }
    }
}

SPARGE_DEVICE void store_output(const AttendParams& p, const Work& work, const Accumulators& out, const Softmax& softmax) {
  if (!RowStore::whole(p))
    store_pairs(p, work, out, softmax);
  else if (p.out.dtype == DType::kBf16)
    store_whole_rows<DType::kBf16>(p, work, out, softmax);
  else
    store_whole_rows<DType::kFp16>(p, work, out, softmax);
}

}  // namespace sparge::attend

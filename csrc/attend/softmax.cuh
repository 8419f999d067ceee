// SPDX-License-Identifier: Apache-2.0
// Online softmax in log2 units over the blocks of the list, with the true running maximum.
#pragma once

#include "../common/reduce.cuh"
#include "../ptx/barrier.cuh"
#include "products.cuh"

namespace sparge::attend {

// E4M3 P uses all of E4M3: the shift cancels between numerator and row sum.
constexpr float kShift = kElement == Element::kInt8E4M3 ? 8.807354922057604f : 0.0f;  // log2 448

using PerRow = float[kRowTiles][2];  // of the four rows of a thread

// From raw scores to log2 units. Row scales stay in shared memory: registers are what this kernel lacks.
struct ScoreScale {
  const Smem& smem;
  float block;  // softmax scale * log2 e * the K tile's scale

  SPARGE_DEVICE float of(i32 row, i32 m, i32 half) const {
    return is_quantized(kElement) ? smem.q_scale[row + row_step(m, half)] * block : block;
  }
};

// Maximum of rows past the last query: they find every block negligible, so they never hold a skip back.
constexpr float kNoRow = 1e30f;

struct Softmax {
  float (&max)[kRowTiles][2][kThreads];  // log2 units
  float (&sum)[kRowTiles][2][kThreads];  // this thread's columns only, until finish()

  SPARGE_DEVICE explicit Softmax(Smem& smem) : max(smem.row_max), sum(smem.row_sum) {
    const i32 row = first_row();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        max[m][half][threadIdx.x] = row + row_step(m, half) < smem.work.queries ? kMinusInfinity : kNoRow;
        sum[m][half][threadIdx.x] = 0.0f;
      }
  }

  // Row maxima of the block in log2 units.
  SPARGE_DEVICE void block_max(const Scores& s, const ScoreScale& scale, PerRow& block) const {
    const i32 row = first_row();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = kMinusInfinity;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) most = fmaxf(most, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        block[m][half] = (lane_max<1, 4>(most) - kScoreZero) * scale.of(row, m, half);
      }
  }

  // Whether the block is negligible for all rows of this warp's row group.
  SPARGE_DEVICE bool negligible(const PerRow& block, float pvthreshd) const {
    bool all = true;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        all = all && !(block[m][half] - max[m][half][threadIdx.x] >= -pvthreshd);  // also true of -inf - -inf: nothing to add
    return threadIdx.x < kRowGroupThreads ? ptx::barrier_all<kBarrierUpperRows, kRowGroupThreads>(all)
                                          : ptx::barrier_all<kBarrierLowerRows, kRowGroupThreads>(all);
  }

  // Takes the block's maxima in; alpha is what earlier sums shrink by.
  SPARGE_DEVICE void raise_max(const PerRow& block, PerRow& alpha) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float most = fmaxf(max[m][half][threadIdx.x], block[m][half]);
        alpha[m][half] = most == kMinusInfinity ? 1.0f : ptx::exp2_approx(max[m][half][threadIdx.x] - most);
        max[m][half][threadIdx.x] = most;
        sum[m][half][threadIdx.x] *= alpha[m][half];
      }
  }

  // The scores of row tile m become probabilities relative to the running maximum.
  SPARGE_DEVICE void exponentials(Scores& s, i32 m, const ScoreScale& score_scale) {
    const i32 row = first_row();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = score_scale.of(row, m, half);
      const float reference = max[m][half][threadIdx.x] == kMinusInfinity ? 0.0f : max[m][half][threadIdx.x];
      float added = 0.0f;
      const float bias = kShift - reference - kScoreZero * scale;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        float* pair = &s[m][n][2 * half];
        pair[0] = ptx::exp2_approx(pair[0] * scale + bias);
        pair[1] = ptx::exp2_approx(pair[1] * scale + bias);
        added += pair[0] + pair[1];
      }
      sum[m][half][threadIdx.x] += added;
    }
  }

  SPARGE_DEVICE void finish() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half][threadIdx.x] = lane_sum<1, 4>(sum[m][half][threadIdx.x]);
  }
};

// Past the last key, and above the causal diagonal: minus infinity. Comparing constants with one bound a row keeps this
// rare branch from costing the main loop registers.
SPARGE_DEVICE void mask_scores(Scores& s, const Work& work, i32 block, bool causal) {
  const i32 first_key = block * kKeyBlock + threadIdx.x % 4 * 2;
  const i32 first_query = work.first_query + first_row();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 end = causal ? smaller(work.key_length, first_query + row_step(m, half) + 1) : work.key_length;
      const i32 bound = end - first_key;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (8 * n + i >= bound) s[m][n][2 * half + i] = kMinusInfinity;
    }
}

SPARGE_DEVICE bool needs_mask(const Work& work, i32 block, bool causal) {
  const i32 last_key = block * kKeyBlock + kKeyBlock - 1;
  return last_key >= work.key_length || (causal && last_key > work.first_query);
}

// Rescales only when a maximum moved; after the first blocks it rarely does.
SPARGE_DEVICE void rescale(Accumulators& out, const PerRow& alpha) {
  const bool moved = alpha[0][0] != 1.0f || alpha[0][1] != 1.0f || alpha[1][0] != 1.0f || alpha[1][1] != 1.0f;
  if (!__any_sync(kFullWarp, moved)) return;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < kChannelTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[m][n][i] *= alpha[m][i / 2];
}

}  // namespace sparge::attend

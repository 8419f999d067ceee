// SPDX-License-Identifier: Apache-2.0
// Online softmax in log2 units over the blocks of the list, with the true running maximum.
#pragma once

#include "../common/reduce.cuh"
#include "../ptx/barrier.cuh"
#include "products.cuh"

namespace sparge::attend {

// E4M3 P uses all of E4M3: the shift cancels between numerator and row sum.
constexpr float kShift = kElement == Element::kInt8E4M3 ? 8.807354922057604f : 0.0f;  // log2 448

// From raw scores to log2 units. Row scales stay in shared memory: registers are what this kernel lacks.
struct ScoreScale {
  const Smem& smem;
  float block;  // softmax scale * log2 e * the K tile's scale

  SPARGE_DEVICE float of(i32 m, i32 half) const { return is_quantized(kElement) ? smem.q_scale[row_of(m, half)] * block : block; }
};

struct Softmax {
  float max[kRowTiles][2];  // log2 units
  float sum[kRowTiles][2];  // this thread's columns only, until finish()

  SPARGE_DEVICE Softmax() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        max[m][half] = kMinusInfinity;
        sum[m][half] = 0.0f;
      }
  }

  // Row maxima of the block in log2 units.
  SPARGE_DEVICE void block_max(const Scores& s, const ScoreScale& scale, Rescale& block) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = kMinusInfinity;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) most = fmaxf(most, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        block[m][half] = (lane_max<1, 4>(most) - kScoreZero) * scale.of(m, half);
      }
  }

  // Whether the block is negligible for all rows of this warp's row group.
  SPARGE_DEVICE bool negligible(const Rescale& block, float pvthreshd, i32 queries) const {
    bool all = true;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        all = all && (block[m][half] - max[m][half] < -pvthreshd || block[m][half] == kMinusInfinity || row_of(m, half) >= queries);
    const int group = threadIdx.x / kRowGroupThreads;
    return ptx::barrier_all(kBarrierFirstRowGroup + group, kRowGroupThreads, all);
  }

  // Takes the block's maxima in; alpha is what earlier sums shrink by.
  SPARGE_DEVICE void raise_max(const Rescale& block, Rescale& alpha) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float most = fmaxf(max[m][half], block[m][half]);
        alpha[m][half] = most == kMinusInfinity ? 1.0f : ptx::exp2_approx(max[m][half] - most);
        max[m][half] = most;
        sum[m][half] *= alpha[m][half];
      }
  }

  // Scores become probabilities relative to the running maximum.
  SPARGE_DEVICE void exponentials(Scores& s, const ScoreScale& score_scale) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = score_scale.of(m, half);
        const float reference = max[m][half] == kMinusInfinity ? 0.0f : max[m][half];
        const float bias = kShift - reference - kScoreZero * scale;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[m][n][i] = ptx::exp2_approx(s[m][n][i] * scale + bias);
            sum[m][half] += s[m][n][i];
          }
      }
  }

  SPARGE_DEVICE void finish() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] = lane_sum<1, 4>(sum[m][half]);
  }
};

// Past the last key, and above the causal diagonal: minus infinity. Comparing constants with one bound a row keeps this
// rare branch from costing the main loop registers.
SPARGE_DEVICE void mask_scores(Scores& s, const Work& work, i32 block, bool causal) {
  const i32 first_key = block * kKeyBlock + threadIdx.x % 4 * 2;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 end = causal ? smaller(work.key_length, work.first_query + row_of(m, half) + 1) : work.key_length;
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
SPARGE_DEVICE void rescale(Accumulators& out, const Rescale& alpha) {
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

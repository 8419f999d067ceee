// SPDX-License-Identifier: Apache-2.0
// Bounds of the scales of query rows, and what makes all rows of a head NaN.
//
// A logit in log2 units is an integer, the sum of products of levels, times a step: row scale x key scale x softmax scale x log2 e.
// The scale of a row whose steps are all below kLeastStep grows to that, and its logits stay below 2^-19: times the least key scale,
// and times 2^-18 (hopper/fixed_exp2.cuh), a smaller step could underflow, and 0 times minus infinity is NaN. Where a step is above
// kMostStep, the row's scale shrinks until the largest is not: float32 would round exponents so that probabilities exceed what P
// can hold by more than 2 %, and rounding Q and K to INT8 moves logits by hundreds of steps anyway. Log-sum-exps and partial results
// are put right.
// Where the largest possible logit overflows, and where a key or a value of the head is not finite, the row's scale is NaN. Of 16
// bits finite.cuh says so.
#pragma once

#include "../common/int8.cuh"
#include "pool.cuh"

namespace sparge::attend {

constexpr float kLeastStep = 0x1p-40f;
constexpr float kMostStep = 0x1p-4f;
constexpr float kMostSum = kHeadDim * kKeyLevels * kKeyLevels;

// Of the row scales of a head.
struct ScaleBounds {
  float least, most;
  float overflow;  // times a row scale: the largest possible logit; NaN where a key or value is not finite

  // For shared memory, which constructs nothing.
  ScaleBounds() = default;

  SPARGE_DEVICE ScaleBounds(const AttendParams& p, i32 kv_at) {
    const float key_scale = ptx::max_or_nan(p.reach[kv_at] * (1.0f / kKeyLevels), kZeroScale);  // the head's largest
    const float steepest = key_scale * (p.scale * kLog2E);
    most = kMostStep * ptx::reciprocal_approx(steepest), overflow = kMostSum * steepest;
    // Tiny keys must not make steps of pseudo-keys large.
    least = kLeastStep * ptx::reciprocal_approx(fmaxf(key_scale, kPoolScale) * (p.scale * kLog2E));
  }

  SPARGE_DEVICE float bounded(float scale) const {
    const float logit = scale * overflow;
    return fminf(fmaxf(scale, least), most) + (logit - logit);
  }
  // What a row's maximum is to be multiplied with, for log-sum-exps and partial results: more than 1 where its scale shrank.
  SPARGE_DEVICE static float sharpness(float scale, float bounded) {
    return fmaxf(scale * ptx::reciprocal_approx(bounded), 1.0f);
  }
};

}  // namespace sparge::attend

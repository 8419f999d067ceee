// SPDX-License-Identifier: Apache-2.0
// Bounds of the scales of query rows, and what makes all rows of a head NaN.
//
// A logit in log2 units is an integer (sum of products of levels) times a step: row scale x key scale x softmax scale x log2 e.
// Small steps: where all steps of a row are below kLeastStep, its scale grows until the largest is that; logits stay below 2^-19.
// A smaller step could underflow times the least key scale and 2^-18 (hopper/fixed_exp2.cuh), and 0 times minus infinity is NaN.
// Large steps: where a step is above kMostStep, the row's scale shrinks until none is. Else float32 would round exponents so that
// probabilities exceed what P can hold by more than 2 %. Rounding Q and K to INT8 moves such logits by hundreds of steps anyway.
// Log-sum-exps and partial results are corrected.
// NaN is the row's scale where the largest possible logit overflows, or a key or value of the head is not finite. For 16 bits
// see finite.cuh.
#pragma once

#include "../common/int8.cuh"
#include "../ptx/special.cuh"
#include "pool.cuh"

namespace sparge::attend {

constexpr float kLeastStep = 0x1p-40f;
constexpr float kMostStep = 0x1p-4f;
constexpr float kMostSum = kHeadDim * kInt8Levels * kInt8Levels;

// Bounds for the query rows of a head.
struct ScaleBounds {
  float least, most;
  float overflow;  // largest possible logit over row scale; NaN where a key or value is not finite

  // Shared memory constructs nothing.
  ScaleBounds() = default;

  SPARGE_DEVICE ScaleBounds(const AttendParams& p, i32 kv_at) {
    const float key_scale = ptx::max_or_nan(p.reach[kv_at] * (1.0f / kInt8Levels), kZeroScale);  // the head's largest
    const float steepest = key_scale * (p.scale * kLog2E);
    most = kMostStep * ptx::reciprocal_approx(steepest), overflow = kMostSum * steepest;
    // Tiny keys must not make steps of pooled keys large.
    least = kLeastStep * ptx::reciprocal_approx(fmaxf(key_scale, kPoolScale) * (p.scale * kLog2E));
  }

  SPARGE_DEVICE float bounded(float scale) const {
    const float logit = scale * overflow;
    return fminf(fmaxf(scale, least), most) + (logit - logit);
  }
  // Factor on a row's maximum in log-sum-exps and partial results: more than 1 where its scale shrank.
  SPARGE_DEVICE static float sharpness(float scale, float bounded) {
    return fmaxf(scale * ptx::reciprocal_approx(bounded), 1.0f);
  }
};

}  // namespace sparge::attend

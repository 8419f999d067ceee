// SPDX-License-Identifier: Apache-2.0
// Numbers that scores and softmax share.
#pragma once

#include "../common/config.cuh"

namespace sparge::attend {

// Products of INT8 start from the bits of 1.5 * 2^23, so that their integer sums read as float32, offset by it: exact for
// |sum| < 2^22 (127^2 * 128 = 2.06 million), and no conversion is spent.
constexpr float kScoreZero = is_quantized(kElement) ? 12582912.0f : 0.0f;

// Values in INT8: P is unsigned levels of its row's maximum in the key block, so that sums of a block are integers.
constexpr bool kIntegerValues = kElement == Element::kInt8Int8;

// E4M3 P uses all of E4M3, integer P all of a byte: the shift cancels between numerator and row sum.
constexpr float kShift = kElement == Element::kInt8E4M3 ? 8.807354922057604f  // log2 448
                         : kIntegerValues               ? 7.994353436858858f  // log2 255
                                                        : 0.0f;
constexpr float kUnshift = kElement == Element::kInt8E4M3 ? 1.0f / kValueLevels : kIntegerValues ? 1.0f / 255.0f : 1.0f;

// Maximum of rows past the last query: they find every block negligible, so they never prevent a skip.
constexpr float kNoRow = 1e30f;

// Threshold of the PV filter that lets every tile pass.
constexpr float kNeverNegligible = -kMinusInfinity;

}  // namespace sparge::attend

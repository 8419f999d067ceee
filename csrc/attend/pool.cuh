// SPDX-License-Identifier: Apache-2.0
// Pooled keys: one for each block that the list leaves out, in tiles that come after the list's blocks and go through the same
// softmax.
//
// A pooled key has a scale and a bias of its own. They are applied at once to the sum x of its products, which becomes
//   kScoreZero + logit / (row scale * kPoolScale), logit = (x - kScoreZero) * row scale * scale + bias, in log2 units.
// With integer values a pooled key stands for its value in units of its own scale: the logarithm of the scale is in the bias, and row
// sums divide by it. So all values of a tile share one factor, and small ones keep their precision.
// So what follows reads it like the sum of any key. The units are so small that the offset rounds nothing away.
#pragma once

#include "constants.cuh"
#include "work.cuh"

namespace sparge::attend {

// What a tile of pooled keys has as its K scale.
constexpr float kPoolScale = is_quantized(kElement) ? 0x1p-20f : 1.0f;

// The key blocks below `end` that word `index` of the map leaves out, a bit each.
SPARGE_DEVICE u32 open_blocks(u32 word, i32 index, i32 end) {
  const i32 left = end - index * kMapBits;
  return left <= 0 ? 0 : ~word & (left < kMapBits ? (1u << left) - 1 : ~0u);
}

// The column as pool_score takes it.
SPARGE_DEVICE PoolColumn prepared(const PoolColumn& column, const Work& work, bool open) {
  return open ? PoolColumn{column.scale / kPoolScale, column.bias + work.log2_pool_weight} : PoolColumn{0.0f, kMinusInfinity};
}

// `per_bias` is 1 / (row scale * kPoolScale).
SPARGE_DEVICE float pool_score(float x, const PoolColumn& column, float per_bias) {
  return kScoreZero + (x - kScoreZero) * column.scale + column.bias * per_bias;
}

}  // namespace sparge::attend

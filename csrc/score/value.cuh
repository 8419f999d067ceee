// SPDX-License-Identifier: Apache-2.0
// A number of a caller's tensor as it is: other loads of float32 round it to what the kernels compute with.
#pragma once

#include "../params.cuh"
#include "../ptx/convert.cuh"

namespace sparge::score {

SPARGE_DEVICE float value_at(const TensorView& view, i64 at) {
  if (view.dtype == DType::kFp32) return static_cast<const float*>(view.data)[at];
  const u16 bits = static_cast<const u16*>(view.data)[at];
  return view.dtype == DType::kBf16 ? ptx::bf16_to_float(bits) : ptx::fp16_to_float(bits);
}

}  // namespace sparge::score

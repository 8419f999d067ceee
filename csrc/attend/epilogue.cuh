// SPDX-License-Identifier: Apache-2.0
// From accumulators to the caller's layout: O = v_mean + v_scale * acc / l, 0 where no key was seen.
#pragma once

#include "softmax.cuh"

namespace sparge::attend {

// Writes channels channel and channel + 1 of one row.
SPARGE_DEVICE void store_pair(const TensorView& view, char* row, i32 channel, i32 channels, float low, float high) {
  if (view.dtype == DType::kFp32) {
    float* at = reinterpret_cast<float*>(row) + channel;
    if (channel < channels) at[0] = low;
    if (channel + 1 < channels) at[1] = high;
    return;
  }
  const u32 pair = view.dtype == DType::kBf16 ? ptx::pack_bf16(low, high) : ptx::pack_fp16(low, high);
  u16* at = reinterpret_cast<u16*>(row) + channel;
  if (view.vectorized && channel + 1 < channels) {
    *reinterpret_cast<u32*>(at) = pair;
  } else {
    if (channel < channels) at[0] = static_cast<u16>(pair);
    if (channel + 1 < channels) at[1] = static_cast<u16>(pair >> 16);
  }
}

struct Value {
  float mean = 0.0f, scale = 1.0f;

  SPARGE_DEVICE Value(const AttendParams& p, i32 kv_at, i32 channel) {
    if constexpr (is_quantized(kElement)) {
      mean = p.v_mean[kv_at * kHeadDim + channel];
      scale = p.v_scale[kv_at * kHeadDim + channel];
    }
  }
};

SPARGE_DEVICE void store_row_facts(const AttendParams& p, const Work& work, const Smem& smem, const Softmax& softmax) {
  if (threadIdx.x % 4 != 0) return;
  constexpr float kUnshift = 1.0f / (kShift == 0.0f ? 1.0f : kValueLevels);
  for (int m = 0; m < kRowTiles; ++m)
    for (int half = 0; half < 2; ++half) {
      const i32 row = first_row() + row_step(m, half);
      if (row >= work.queries) continue;
      const i64 at = static_cast<i64>(work.head_at) * p.problem.queries + work.first_query + row;
      const float sum = softmax.sum[m][half][threadIdx.x] * kUnshift, most = softmax.max[m][half][threadIdx.x];
      if (p.lse) {
        const float correction = is_quantized(kElement) ? smem.q_dot_mean[row] * p.scale : 0.0f;
        p.lse[at] = sum > 0.0f ? (most + log2f(sum)) * kLn2 + correction : kMinusInfinity;
      }
      if (p.partial_out) {
        p.partial_max[at] = most;
        p.partial_sum[at] = sum;
      }
    }
}

// One row after another, so that a single row address is alive beside the accumulators.
SPARGE_DEVICE void store_output(const AttendParams& p, const Work& work, const Accumulators& out, const Softmax& softmax) {
  const i64 out_bytes = p.out.dtype == DType::kFp32 ? 4 : 2;
  const i32 channels = p.problem.channels;
  constexpr float kUnshift = 1.0f / (kShift == 0.0f ? 1.0f : kValueLevels);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 row = first_row() + row_step(m, half);
      if (row >= work.queries) continue;
      const i64 query = work.first_query + row;
      const float sum = softmax.sum[m][half][threadIdx.x];
      const bool seen = sum > 0.0f;
      const float inverse = seen ? 1.0f / sum : 0.0f;
      char* at = static_cast<char*>(p.out.data) +
                 (work.b * p.out.batch_stride + work.head * p.out.head_stride + query * p.out.token_stride) * out_bytes;
      float* partial = p.partial_out ? p.partial_out + (static_cast<i64>(work.head_at) * p.problem.queries + query) * channels : nullptr;
#pragma unroll
      for (int n = 0; n < kChannelTiles; ++n) {
        const i32 channel = 8 * n + threadIdx.x % 4 * 2;
        const Value low(p, work.kv_at, channel), high(p, work.kv_at, channel + 1);
        const float first = low.scale * out[m][n][2 * half], second = high.scale * out[m][n][2 * half + 1];
        if (partial) {
          if (channel < channels) partial[channel] = (first + low.mean * sum) * kUnshift;
          if (channel + 1 < channels) partial[channel + 1] = (second + high.mean * sum) * kUnshift;
        }
        store_pair(p.out, at, channel, channels, seen ? low.mean + first * inverse : 0.0f, seen ? high.mean + second * inverse : 0.0f);
      }
    }
}

}  // namespace sparge::attend

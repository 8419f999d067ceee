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
      const i32 row = row_of(m, half);
      if (row >= work.queries) continue;
      const i64 at = static_cast<i64>(work.head_at) * p.problem.queries + work.first_query + row;
      const float sum = softmax.sum[m][half] * kUnshift, most = softmax.max[m][half];
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

SPARGE_DEVICE void store_output(const AttendParams& p, const Work& work, const Accumulators& out, const Softmax& softmax) {
  const i64 out_bytes = p.out.dtype == DType::kFp32 ? 4 : 2;
  char* head = static_cast<char*>(p.out.data) + (work.b * p.out.batch_stride + work.head * p.out.head_stride) * out_bytes;
  constexpr float kUnshift = 1.0f / (kShift == 0.0f ? 1.0f : kValueLevels);
#pragma unroll
  for (int n = 0; n < kChannelTiles; ++n) {
    const i32 channel = 8 * n + threadIdx.x % 4 * 2;
    const Value low(p, work.kv_at, channel), high(p, work.kv_at, channel + 1);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i32 row = row_of(m, half);
        if (row >= work.queries) continue;
        const i64 query = work.first_query + row;
        const float sum = softmax.sum[m][half];
        const float first = out[m][n][2 * half], second = out[m][n][2 * half + 1];
        if (p.partial_out) {
          float* at = p.partial_out + (static_cast<i64>(work.head_at) * p.problem.queries + query) * p.problem.channels + channel;
          if (channel < p.problem.channels) at[0] = (low.scale * first + low.mean * sum) * kUnshift;
          if (channel + 1 < p.problem.channels) at[1] = (high.scale * second + high.mean * sum) * kUnshift;
        }
        const float inverse = 1.0f / sum;
        const bool seen = sum > 0.0f;
        store_pair(p.out, head + query * p.out.token_stride * out_bytes, channel, p.problem.channels,
                   seen ? low.mean + low.scale * first * inverse : 0.0f, seen ? high.mean + high.scale * second * inverse : 0.0f);
      }
  }
}

}  // namespace sparge::attend

// SPDX-License-Identifier: Apache-2.0
// From unnormalised sums to the caller's layout: O = v_mean + output_scale * v_scale * acc / l, 0 where no key was seen. Partial
// results have no output scale.
#pragma once

#include "../ptx/convert.cuh"
#include "../ptx/schedule.cuh"
#include "constants.cuh"
#include "work.cuh"

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

  Value() = default;

  SPARGE_DEVICE Value(const AttendParams& p, i32 kv_at, i32 channel) {
    if constexpr (is_quantized(kElement)) {
      mean = p.v_mean[kv_at * kHeadDim + channel];
      scale = p.v_scale[kv_at * kHeadDim + channel];
    }
  }
};

// Of channels channel and channel + 1. Nobody writes them meanwhile, so that loads need not stay behind stores.
SPARGE_DEVICE void load_value_pair(Value& low, Value& high, const AttendParams& p, i32 kv_at, i32 channel) {
  if constexpr (is_quantized(kElement)) {
    ptx::load_constant(low.mean, high.mean, p.v_mean + kv_at * kHeadDim + channel);
    ptx::load_constant(low.scale, high.scale, p.v_scale + kv_at * kHeadDim + channel);
  }
}

// Output row of one query, by its token, and its row of partial results where those are asked for.
struct RowStore {
  const AttendParams& p;
  const Work& work;
  char* out;
  float* partial;
  float sum, inverse;

  SPARGE_DEVICE RowStore(const AttendParams& params, const Work& w, i32 token, float row_sum, float inverse_output_scale = 1.0f)
      : p(params), work(w), sum(row_sum), inverse(row_sum != 0.0f ? 1.0f / (row_sum * inverse_output_scale) : 0.0f) {
    const i64 out_bytes = p.out.dtype == DType::kFp32 ? 4 : 2;
    out = static_cast<char*>(p.out.data) +
          (work.b * p.out.batch_stride + work.head * p.out.head_stride + token * p.out.token_stride) * out_bytes;
    partial = p.partial_out ? p.partial_out + (static_cast<i64>(work.head_at) * p.tokens + token) * p.problem.channels : nullptr;
  }

  // Accumulators of channels channel and channel + 1.
  SPARGE_DEVICE void store(i32 channel, float low_sum, float high_sum) const {
    store(channel, low_sum, high_sum, Value(p, work.kv_at, channel), Value(p, work.kv_at, channel + 1));
  }

  SPARGE_DEVICE void store(i32 channel, float low_sum, float high_sum, const Value& low, const Value& high) const {
    const i32 channels = p.problem.channels;
    if (partial) {
      if (channel < channels) partial[channel] = low.scale * (low_sum * kUnshift) + low.mean * (sum * kUnshift);
      if (channel + 1 < channels) partial[channel + 1] = high.scale * (high_sum * kUnshift) + high.mean * (sum * kUnshift);
    }
    const bool seen = sum != 0.0f;  // NaN goes on to the output
    store_pair(p.out, out, channel, channels, seen ? low.mean + low.scale * (low_sum * inverse) : 0.0f,
               seen ? high.mean + high.scale * (high_sum * inverse) : 0.0f);
  }

  // Whether a pair may be packed without a look at the tensor: 16-bit rows of all the kernel's channels, no partial results.
  SPARGE_DEVICE static bool whole(const AttendParams& p) {
    return p.out.vectorized && p.problem.channels == kHeadDim && !p.partial_out && p.out.dtype != DType::kFp32;
  }

  // A pair as `store` writes it, bit for bit, where rows are whole.
  template <DType kType>
  SPARGE_DEVICE u32 packed(float low_sum, float high_sum, const Value& low, const Value& high) const {
    static_assert(kType != DType::kFp32, "a pair is one word");
    const float first = low.mean + low.scale * (low_sum * inverse), second = high.mean + high.scale * (high_sum * inverse);
    const u32 pair = kType == DType::kBf16 ? ptx::pack_bf16(first, second) : ptx::pack_fp16(first, second);
    return sum != 0.0f ? pair : 0;
  }
};

// What a log-sum-exp needs of a query beside its softmax.
struct QueryFacts {
  float dot_mean = 0.0f;   // q . k_mean
  float sharpness = 1.0f;  // see row_scale.cuh
};

// Log-sum-exp, row maximum and row sum of one query; `most` in log2 units. `facts()` gives its QueryFacts.
template <typename Facts>
SPARGE_DEVICE void store_row_facts(const AttendParams& p, const Work& work, i32 token, float most, float row_sum, Facts&& facts) {
  if (!p.lse && !p.partial_out) return;
  const QueryFacts query = facts();
  const i64 at = static_cast<i64>(work.head_at) * p.tokens + token;
  most *= query.sharpness;
  const float sum = row_sum * kUnshift;
  if (p.lse) p.lse[at] = sum != 0.0f ? (most + log2f(sum)) * kLn2 + query.dot_mean * p.scale : kMinusInfinity;
  if (p.partial_out) {
    p.partial_max[at] = most;
    p.partial_sum[at] = sum;
  }
}

}  // namespace sparge::attend

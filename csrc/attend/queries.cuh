// SPDX-License-Identifier: Apache-2.0
// Reads the query rows once, straight from the caller's tensor, into a swizzled tile of INT8 or 16-bit rows.
#pragma once

#include "../common/balance.cuh"
#include "../common/chunks.cuh"
#include "../common/int8.cuh"
#include "../common/reduce.cuh"
#include "layout.cuh"

namespace sparge::attend {

constexpr int kTokenLanes = kHeadDim / kLaneChannels;
constexpr int kTokensPerPass = kWarpSize / kTokenLanes;

// 16-bit queries become NaN where they are infinite, and all of them where the head is not finite. With 8 bits the scale does.
SPARGE_DEVICE void store_query(Smem& smem, i32 row, i32 channel, const float (&x)[kLaneChannels], bool finite) {
  if constexpr (is_quantized(kElement)) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) amax = ptx::max_or_nan(amax, fabsf(x[i]));
    amax = lane_max_or_nan<1, kTokenLanes>(amax);
    // common/int8.cuh, written out: with a call ptxas spills on sm_120a.
    const float inverse_scale = amax > kLeastAmax ? kInt8Levels / amax : 1.0f;
    if (channel == 0) smem.q_scale[row] = amax;
    u8* at = smem.q + tile_offset<kQueryRowBytes>(row, channel / 16) + channel % 16;
    *reinterpret_cast<Vec8*>(at) = {pack_int8(x, inverse_scale), pack_int8(x + 4, inverse_scale)};
  } else {
    auto pack = [&](int i) -> u32 {
      if (!finite) return ~0u;  // two NaN
      return kElement == Element::kBf16 ? ptx::nan_if_infinite_bf16(ptx::pack_bf16(x[i], x[i + 1]))
                                        : ptx::nan_if_infinite_fp16(ptx::pack_fp16(x[i], x[i + 1]));
    };
    *reinterpret_cast<Vec16*>(smem.q + tile_offset<kQueryRowBytes>(row, channel / 8)) = {pack(0), pack(2), pack(4), pack(6)};
  }
}

// From the largest magnitudes of the warp's rows to their scales, a lane each. Not in `store_query`, where ptxas spills.
SPARGE_DEVICE void scale_queries(Smem& smem, i32 first_row) {
  const i32 lane = ptx::thread_index() % kWarpSize;
  if (lane >= kWarpRows) return;
  const float scale = int8_scale(smem.q_scale[first_row + lane]), bounded = smem.bounds.bounded(scale);
  smem.q_scale[first_row + lane] = bounded;
  smem.q_scale[kRows + first_row + lane] = ScaleBounds::sharpness(scale, bounded);
}

// The warp's query rows on their way from the caller's tensor: each thread has eight channels of some of them. They set out before
// the block map is read, so that both wait at once.
struct QueryRows {
  static constexpr int kPasses = kWarpRows / kTokensPerPass;
  Chunk chunk[kPasses];
  bool balanced = false;  // see common/balance.cuh

  SPARGE_DEVICE QueryRows(const AttendParams& p, const Work& work) {
    if constexpr (is_quantized(kElement)) balanced = p.balance[work.kv_at * kHeadDim] != kNoBalance;
    with_chunks(p.q, work.b, work.head, p.problem.channels, [&](auto rows) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) chunk[pass] = rows.load(work.token(p.problem, row(pass)), channel());
    });
  }

  SPARGE_DEVICE static i32 first_row() { return ptx::thread_index() / kWarpSize * kWarpRows; }
  SPARGE_DEVICE static i32 row(int pass) {
    return first_row() + pass * kTokensPerPass + ptx::thread_index() % kWarpSize / kTokenLanes;
  }
  SPARGE_DEVICE static i32 channel() { return ptx::thread_index() % kTokenLanes * kLaneChannels; }
};

// kType: of the chunks' pairs.
template <DType kType>
SPARGE_DEVICE void store_rows(Smem& smem, const AttendParams& p, const QueryRows& rows, bool finite) {
  const i32 channel = QueryRows::channel();
#pragma unroll
  for (int pass = 0; pass < QueryRows::kPasses; ++pass) {
    const i32 row = QueryRows::row(pass);
    float x[kLaneChannels];
#pragma unroll
    for (int i = 0; i < kLaneChannels; i += 2) unpack_pair(kType, rows.chunk[pass].word[i / 2], x[i], x[i + 1]);
    if (is_quantized(kElement) && p.lse) {
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) dot += x[i] * p.k_mean[smem.work.kv_at * kHeadDim + channel + i];
      dot = lane_sum<1, kTokenLanes>(dot);
      if (channel == 0) smem.q_dot_mean[row] = dot;
    }
    if (is_quantized(kElement) && rows.balanced) {
      Chunk chunk = rows.chunk[pass];
      rotate_queries<kType>(chunk, p.balance + smem.work.kv_at * kHeadDim + channel);
#pragma unroll
      for (int i = 0; i < kLaneChannels; i += 2) unpack_pair(DType::kBf16, chunk.word[i / 2], x[i], x[i + 1]);
    }
    store_query(smem, row, channel, x, finite);
  }
}

// Each warp stores, and later reads, its own rows only.
SPARGE_DEVICE void store_queries(Smem& smem, const AttendParams& p, const QueryRows& rows, bool finite) {
  if (p.q.dtype == DType::kFp16)
    store_rows<DType::kFp16>(smem, p, rows, finite);
  else
    store_rows<DType::kBf16>(smem, p, rows, finite);
  __syncwarp();
  if constexpr (is_quantized(kElement)) {
    scale_queries(smem, QueryRows::first_row());
    __syncwarp();
  }
}

}  // namespace sparge::attend

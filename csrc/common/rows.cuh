// SPDX-License-Identifier: Apache-2.0
// Reading eight neighbouring channels of a token from a caller's tensor, whatever its type and strides.
#pragma once

#include "../params.cuh"
#include "../ptx/convert.cuh"
#include "types.cuh"

namespace sparge {

constexpr int kLaneChannels = 8;

template <DType kType>
SPARGE_DEVICE float load_one(const void* row, i32 channel) {
  if constexpr (kType == DType::kFp32)
    // float32 is read as bf16: the same rounding as a cast, without the copy.
    return __uint_as_float(ptx::pack_bf16(0.0f, static_cast<const float*>(row)[channel]) & 0xFFFF0000u);
  const u16 bits = static_cast<const u16*>(row)[channel];
  return kType == DType::kBf16 ? ptx::bf16_to_float(bits) : ptx::fp16_to_float(bits);
}

SPARGE_DEVICE void unpack_pair(DType type, u32 pair, float& low, float& high) {
  if (type == DType::kBf16) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xFFFF0000u);
  } else {
    low = ptx::fp16_to_float(static_cast<u16>(pair));
    high = ptx::fp16_to_float(static_cast<u16>(pair >> 16));
  }
}

// The tokens of one (batch, head) of a view.
template <DType kType>
struct Rows {
  const char* base;
  i64 token_bytes;
  i32 channels;
  bool vectorized;

  static constexpr int kBytes = kType == DType::kFp32 ? 4 : 2;

  SPARGE_DEVICE Rows(const TensorView& view, i32 b, i32 head, i32 channel_count)
      : base(static_cast<const char*>(view.data) + (b * view.batch_stride + head * view.head_stride) * kBytes),
        token_bytes(view.token_stride * kBytes),
        channels(channel_count),
        vectorized(view.vectorized) {}

  // Channels at and beyond `channels` read as zero: head dims below 64 or 128 are padded here.
  SPARGE_DEVICE void load(i64 token, i32 channel, float (&x)[kLaneChannels]) const {
    const char* row = base + token * token_bytes;
    if (vectorized && channel + kLaneChannels <= channels) {
      if constexpr (kType == DType::kFp32) {
        const Vec16* chunk = reinterpret_cast<const Vec16*>(row + channel * kBytes);
        const Vec16 low = chunk[0], high = chunk[1];
        const u32 word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; i += 2)
          unpack_pair(DType::kBf16, ptx::pack_bf16(__uint_as_float(word[i]), __uint_as_float(word[i + 1])), x[i], x[i + 1]);
      } else {
        const Vec16 chunk = *reinterpret_cast<const Vec16*>(row + channel * kBytes);
        const u32 word[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) unpack_pair(kType, word[i], x[2 * i], x[2 * i + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) x[i] = channel + i < channels ? load_one<kType>(row, channel + i) : 0.0f;
    }
  }
};

// Calls `body(Rows<type>)` for the view's run-time type.
template <typename Body>
SPARGE_DEVICE void with_rows(const TensorView& view, i32 b, i32 head, i32 channels, Body&& body) {
  switch (view.dtype) {
    case DType::kBf16: body(Rows<DType::kBf16>(view, b, head, channels)); break;
    case DType::kFp16: body(Rows<DType::kFp16>(view, b, head, channels)); break;
    case DType::kFp32: body(Rows<DType::kFp32>(view, b, head, channels)); break;
  }
}

}  // namespace sparge

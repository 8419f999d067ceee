// SPDX-License-Identifier: Apache-2.0
// Reading neighbouring channels of a token from a caller's tensor, whatever its type and strides.
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

  // Four or eight channels from a multiple of that on. Channels at and beyond `channels` read as zero: head dims below 64
  // or 128 are padded here.
  template <int kCount>
  SPARGE_DEVICE void load(i64 token, i32 channel, float (&x)[kCount]) const {
    const char* row = base + token * token_bytes;
    if (vectorized && channel + kCount <= channels) {
      u32 bits[kCount * kBytes / 4];
      load_bits(bits, token, channel);
      unpack(bits, x);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = channel + i < channels ? load_one<kType>(row, channel + i) : 0.0f;
    }
  }

  template <int kWords>
  SPARGE_DEVICE void load_bits(u32 (&bits)[kWords], i64 token, i32 channel) const {
    load_words(bits, base + token * token_bytes + channel * kBytes);
  }

  template <int kWords, int kCount>
  static SPARGE_DEVICE void unpack(const u32 (&bits)[kWords], float (&x)[kCount]) {
    static_assert(kWords * 4 == kCount * kBytes, "a number for each value");
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      if constexpr (kType == DType::kFp32)
        unpack_pair(DType::kBf16, ptx::pack_bf16(__uint_as_float(bits[i]), __uint_as_float(bits[i + 1])), x[i], x[i + 1]);
      else
        unpack_pair(kType, bits[i / 2], x[i], x[i + 1]);
    }
  }

 private:
  template <int kWords>
  static SPARGE_DEVICE void load_words(u32 (&word)[kWords], const char* at) {
    if constexpr (kWords == 2) {
      const Vec8 chunk = *reinterpret_cast<const Vec8*>(at);
      word[0] = chunk.x, word[1] = chunk.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const Vec16 chunk = reinterpret_cast<const Vec16*>(at)[i / 4];
        word[i] = chunk.x, word[i + 1] = chunk.y, word[i + 2] = chunk.z, word[i + 3] = chunk.w;
      }
    }
  }
};

// Calls `body(Rows<type>)` for the view's run-time type.
template <typename Body>
SPARGE_DEVICE void with_rows(const TensorView& view, i32 b, i32 head, i32 channels, Body&& body) {
  switch (view.dtype) {
    case DType::kBf16:
      body(Rows<DType::kBf16>(view, b, head, channels));
      break;
    case DType::kFp16:
      body(Rows<DType::kFp16>(view, b, head, channels));
      break;
    case DType::kFp32:
      body(Rows<DType::kFp32>(view, b, head, channels));
      break;
  }
}

}  // namespace sparge

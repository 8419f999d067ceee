// SPDX-License-Identifier: Apache-2.0
// Eight neighbouring channels of a token as one load. A thread keeps several in flight, and unpacks them when it needs numbers.
#pragma once

#include "../params.cuh"
#include "../ptx/address.cuh"
#include "../ptx/convert.cuh"
#include "../ptx/cp_async.cuh"
#include "types.cuh"

namespace sparge {

constexpr int kLaneChannels = 8;

SPARGE_DEVICE void unpack_pair(DType type, u32 pair, float& low, float& high) {
  if (type == DType::kBf16) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xFFFF0000u);
  } else {
    low = ptx::fp16_to_float(static_cast<u16>(pair));
    high = ptx::fp16_to_float(static_cast<u16>(pair >> 16));
  }
}

// 16-bit pairs, as the tensor holds them; float32 as bf16.
struct alignas(16) Chunk {
  u32 word[kLaneChannels / 2];
};

// kOther: type, strides or head dim do not fit 16-byte loads of 16-bit numbers. kAny: one code for all, which decides load by
// load, where registers are scarce.
enum class Source : i32 { kBf16, kFp16, kOther, kAny };

// The tokens of one (batch, head) of a view.
template <Source kSource>
struct Chunks {
  static constexpr bool kAsks = kSource == Source::kOther || kSource == Source::kAny;

  const char* base;
  i64 token_bytes;  // below 2^32 unless kOther, for one multiplication an address
  i32 channels;
  DType dtype;
  bool vectorized;

  SPARGE_DEVICE Chunks(const TensorView& view, i32 b, i32 head, i32 channel_count)
      : channels(channel_count), dtype(view.dtype), vectorized(view.vectorized) {
    const i32 bytes = kAsks && dtype == DType::kFp32 ? 4 : 2;
    base = static_cast<const char*>(view.data) + (b * view.batch_stride + head * view.head_stride) * bytes;
    token_bytes = view.token_stride * bytes;
  }

  // The pairs are FP16, else bf16.
  SPARGE_DEVICE bool half() const { return kSource == Source::kFp16 || (kAsks && dtype == DType::kFp16); }

  // From a channel that is a multiple of eight. Zero for token -1, and past the tensor's channels.
  SPARGE_DEVICE Chunk load(i32 token, i32 channel) const {
    Chunk chunk = {};
    if constexpr (kAsks) {
      if (token >= 0) load_other(chunk, base + token * token_bytes, channel);
    } else if (token >= 0 && channel < channels) {
      const Vec16 words = *reinterpret_cast<const Vec16*>(ptx::global_row(base + channel * 2, token, token_bytes));
      chunk = {words.x, words.y, words.z, words.w};
    }
    return chunk;
  }

  // Starts a load into shared memory. The chunk is there, for this thread, after ptx::cp_async_wait.
  SPARGE_DEVICE void fetch(Chunk& destination, i32 token, i32 channel) const {
    if (vectorized && dtype != DType::kFp32 && channel + kLaneChannels <= channels)
      ptx::cp_async_16_or_zero(ptx::shared_address(&destination), token >= 0 ? at(token, channel) : base, token >= 0);
    else
      destination = load(token, channel);
  }

  SPARGE_DEVICE const char* at(i64 token, i32 channel) const { return base + token * token_bytes + channel * 2; }

  SPARGE_DEVICE void unpack(u32 word, float& low, float& high) const {
    unpack_pair(half() ? DType::kFp16 : DType::kBf16, word, low, high);
  }
  SPARGE_DEVICE void unpack(const Chunk& chunk, float (&x)[kLaneChannels]) const {
#pragma unroll
    for (int i = 0; i < kLaneChannels; i += 2) unpack(chunk.word[i / 2], x[i], x[i + 1]);
  }

 private:
  SPARGE_DEVICE void load_other(Chunk& chunk, const char* row, i32 channel) const {
    if constexpr (kSource == Source::kAny)
      if (vectorized && dtype != DType::kFp32 && channel + kLaneChannels <= channels) {
        const Vec16 words = reinterpret_cast<const Vec16*>(row)[channel / kLaneChannels];
        chunk = {words.x, words.y, words.z, words.w};
        return;
      }
    if (vectorized && dtype == DType::kFp32 && channel + kLaneChannels <= channels) {
      const Vec16* words = reinterpret_cast<const Vec16*>(row + channel * 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Vec16 four = words[i];
        chunk.word[2 * i] = ptx::pack_bf16(__uint_as_float(four.x), __uint_as_float(four.y));
        chunk.word[2 * i + 1] = ptx::pack_bf16(__uint_as_float(four.z), __uint_as_float(four.w));
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      if (channel + i >= channels) continue;
      const u32 bits = dtype == DType::kFp32 ? ptx::pack_bf16(reinterpret_cast<const float*>(row)[channel + i], 0.0f)
                                             : reinterpret_cast<const u16*>(row)[channel + i];
      chunk.word[i / 2] |= bits << (16 * (i % 2));
    }
  }
};

// Type of q, k and v that the kernel is built for; kAny: they may differ, and each is asked at run time.
constexpr Source kBuiltFor = static_cast<Source>(SPARGE_SOURCE);
static_assert(kBuiltFor != Source::kOther, "what does not fit 16-byte loads is served by kernels for any type");

// Calls `body(Chunks<source>)` for the view's type.
template <typename Body>
SPARGE_DEVICE void with_chunks(const TensorView& view, i32 b, i32 head, i32 channels, Body&& body) {
  if constexpr (kBuiltFor != Source::kAny) {
    body(Chunks<kBuiltFor>(view, b, head, channels));
    return;
  }
  const bool whole = view.vectorized && channels % kLaneChannels == 0 && view.token_stride < (1ll << 31);
  if (whole && view.dtype == DType::kBf16)
    body(Chunks<Source::kBf16>(view, b, head, channels));
  else if (whole && view.dtype == DType::kFp16)
    body(Chunks<Source::kFp16>(view, b, head, channels));
  else
    body(Chunks<Source::kOther>(view, b, head, channels));
}

}  // namespace sparge

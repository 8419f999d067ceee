// SPDX-License-Identifier: Apache-2.0
// Two or four neighbouring numbers in one load or store, and what storing as bf16 makes of one.
#pragma once

#include "../ptx/convert.cuh"
#include "types.cuh"

namespace sparge {

template <int kCount>
SPARGE_DEVICE void load_floats(float (&x)[kCount], const float* at) {
  static_assert(kCount == 2 || kCount == 4, "8 or 16 bytes are one load");
  if constexpr (kCount == 4) {
    const Vec16 four = *reinterpret_cast<const Vec16*>(at);
    x[0] = __uint_as_float(four.x), x[1] = __uint_as_float(four.y);
    x[2] = __uint_as_float(four.z), x[3] = __uint_as_float(four.w);
  } else {
    const Vec8 two = *reinterpret_cast<const Vec8*>(at);
    x[0] = __uint_as_float(two.x), x[1] = __uint_as_float(two.y);
  }
}

template <int kCount>
SPARGE_DEVICE void store_floats(float* at, const float (&x)[kCount]) {
  static_assert(kCount == 2 || kCount == 4, "8 or 16 bytes are one store");
  if constexpr (kCount == 4)
    *reinterpret_cast<Vec16*>(at) = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
  else
    *reinterpret_cast<Vec8*>(at) = {__float_as_uint(x[0]), __float_as_uint(x[1])};
}

SPARGE_DEVICE float rounded_to_bf16(float x) { return __uint_as_float(ptx::pack_bf16(0.0f, x) & 0xFFFF0000u); }

template <int kCount>
SPARGE_DEVICE void store_bf16(u16* at, const float (&x)[kCount]) {
  static_assert(kCount == 2 || kCount == 4, "4 or 8 bytes are one store");
  if constexpr (kCount == 4)
    *reinterpret_cast<Vec8*>(at) = {ptx::pack_bf16(x[0], x[1]), ptx::pack_bf16(x[2], x[3])};
  else
    *reinterpret_cast<u32*>(at) = ptx::pack_bf16(x[0], x[1]);
}

}  // namespace sparge

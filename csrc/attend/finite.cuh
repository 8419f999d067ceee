// SPDX-License-Identifier: Apache-2.0
// Whether all 16-bit keys and values of a head are finite, as the threads of a block find out together: two flags a key block.
#pragma once

#include "../common/config.cuh"
#include "../params.cuh"
#include "../ptx/schedule.cuh"

namespace sparge::attend {

constexpr u16 kBothFinite = 0x0101;  // the keys of a block, and the values of one; which is which does not matter here

SPARGE_DEVICE const u16* flags_of_head(const AttendParams& p, i32 kv_at) {
  return reinterpret_cast<const u16*>(p.finite) + static_cast<i64>(kv_at) * p.problem.key_blocks();
}

// The first pair of flags that a thread looks at. The load is on its way while the thread goes on.
SPARGE_DEVICE u16 first_flags(const AttendParams& p, i32 kv_at, i32 thread) {
  return thread < p.problem.key_blocks() ? ptx::load_ahead(flags_of_head(p, kv_at) + thread) : kBothFinite;
}

// Of a thread among `threads` that ask together, with its first flags: whether all keys and values that it looks at are finite.
SPARGE_DEVICE bool sees_finite(const AttendParams& p, i32 kv_at, i32 thread, i32 threads, u16 first) {
  const i32 pairs = p.problem.key_blocks();
  const u16* flags = flags_of_head(p, kv_at);
#pragma unroll 4
  for (i32 pair = thread + threads; pair < pairs; pair += threads) first &= flags[pair];
  return first == kBothFinite;
}

}  // namespace sparge::attend

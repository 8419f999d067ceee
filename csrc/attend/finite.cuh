// SPDX-License-Identifier: Apache-2.0
// Whether all 16-bit keys and values of a head are finite: two flags a key block, which the threads of a block read together.
#pragma once

#include "../common/config.cuh"
#include "../params.cuh"
#include "../ptx/schedule.cuh"

namespace sparge::attend {

constexpr u16 kBothFinite = 0x0101;  // two flags, of keys or of values: which does not matter here

SPARGE_DEVICE const u16* flags_of_head(const AttendParams& p, i32 kv_at) {
  return reinterpret_cast<const u16*>(p.finite) + static_cast<i64>(kv_at) * p.problem.key_blocks();
}

// First pair of flags of a thread. Its load starts here, and the thread goes on.
SPARGE_DEVICE u16 first_flags(const AttendParams& p, i32 kv_at, i32 thread) {
  return thread < p.problem.key_blocks() ? ptx::load_ahead(flags_of_head(p, kv_at) + thread) : kBothFinite;
}

// Whether all keys and values whose flags this thread of `threads` reads are finite; `first` are its first flags.
SPARGE_DEVICE bool sees_finite(const AttendParams& p, i32 kv_at, i32 thread, i32 threads, u16 first) {
  const i32 pairs = p.problem.key_blocks();
  const u16* flags = flags_of_head(p, kv_at);
#pragma unroll 4
  for (i32 pair = thread + threads; pair < pairs; pair += threads) first &= flags[pair];
  return first == kBothFinite;
}

}  // namespace sparge::attend

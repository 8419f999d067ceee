// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies from global to shared memory (sm_80 and up).
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

SPARGE_DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

SPARGE_DEVICE void cp_async_16(u32 destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

// 16 bytes of zeros where there is nothing to read.
SPARGE_DEVICE void cp_async_16_or_zero(u32 destination, const void* source, bool read) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(read ? 16 : 0) : "memory");
}

// Where `act` is true.
SPARGE_DEVICE void cp_async_4_if(bool act, u32 destination, const void* source) {
  asm volatile(
      "{\n"
      ".reg .pred act;\n"
      "setp.ne.u32 act, %2, 0;\n"
      "@act cp.async.ca.shared.global [%0], [%1], 4;\n"
      "}\n" ::"r"(destination),
      "l"(source), "r"(static_cast<u32>(act))
      : "memory");
}

// Two neighbours, in the order of the program: the loads of a long run are not all made first.
SPARGE_DEVICE void load_shared(float& low, float& high, u32 source) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(low), "=f"(high) : "r"(source));
}

SPARGE_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
SPARGE_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace sparge::ptx

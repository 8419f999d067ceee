// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory that count arrivals and bytes (sm_90), and the bulk copies that report to them.
#pragma once

#include "../common/types.cuh"
#include "cp_async.cuh"

namespace sparge::ptx {

SPARGE_DEVICE void mbarrier_init(u64& barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
SPARGE_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

SPARGE_DEVICE void mbarrier_arrive(u64& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

SPARGE_DEVICE void mbarrier_arrive_expect(u64& barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
}

// Whether the phase of that parity has completed; may wait a while before it says no.
SPARGE_DEVICE bool mbarrier_try_wait(u64& barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

SPARGE_DEVICE void mbarrier_wait(u64& barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// Shared memory that this thread wrote becomes visible to the copy engine and the tensor cores.
SPARGE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Both addresses and the size are multiples of 16 bytes.
SPARGE_DEVICE void bulk_copy(void* destination, const void* source, u32 bytes, u64& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(destination)),
               "l"(source), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

}  // namespace sparge::ptx

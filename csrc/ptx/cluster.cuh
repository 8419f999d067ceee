// SPDX-License-Identifier: Apache-2.0
// Thread blocks of a cluster (sm_90): their barrier, and reads of each other's shared memory.
#pragma once

#include "../common/types.cuh"
#include "cp_async.cuh"

#if SPARGE_ARCH == 90
#define SPARGE_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define SPARGE_CLUSTER(blocks)
#endif

namespace sparge::ptx {

constexpr bool kClusters = SPARGE_ARCH == 90;

#if SPARGE_ARCH == 90
// What a thread block wrote to shared memory before it is visible to the others after it.
SPARGE_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// The value at the same place in the shared memory of block `rank`.
SPARGE_DEVICE float load_cluster(const float& value, i32 rank) {
  float remote;
  asm volatile(
      "{\n"
      ".reg .u32 at;\n"
      "mapa.shared::cluster.u32 at, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [at];\n"
      "}\n"
      : "=f"(remote)
      : "r"(shared_address(&value)), "r"(rank)
      : "memory");
  return remote;
}
#endif

}  // namespace sparge::ptx

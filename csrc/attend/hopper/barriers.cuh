// SPDX-License-Identifier: Apache-2.0
// Barriers of the stages and of the work items' queries, as their first users expect them. By one thread.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "layout.cuh"

namespace sparge::hopper {

SPARGE_DEVICE void init_barriers(Smem& smem) {
  for (int stage = 0; stage < kStages; ++stage)
    for (int part = 0; part < kTransfers; ++part) {
      ptx::mbarrier_init(smem.stage[stage].full[part], kWarpSize);
      ptx::mbarrier_init(smem.stage[stage].free[part], kConsumerGroups * kGroupThreads);
    }
  for (int item = 0; item < kItems; ++item) {
    ptx::mbarrier_init(smem.queries[item].asked, 1);
    ptx::mbarrier_init(smem.queries[item].ready, kFeederThreads);
    ptx::mbarrier_init(smem.queries[item].free, kConsumerGroups * kGroupThreads);
  }
  ptx::mbarrier_init_fence();
}

}  // namespace sparge::hopper

// SPDX-License-Identifier: Apache-2.0
// What each warp of a thread block does, with as many registers as that takes.
#pragma once

#include "feeder.cuh"
#include "producer.cuh"

namespace sparge::hopper {

template <typename Consumer>
SPARGE_DEVICE void take_role(const AttendParams& p, Smem& smem) {
  if (uniform(threadIdx.x / kGroupThreads) == kProducer) {
    ptx::release_registers<kProducerRegisters>();
    if (uniform(threadIdx.x % kGroupThreads / kWarpSize) == 0)
      Producer(p, smem).run();
    else
      Feeder(p, smem).run();
  } else {
    ptx::claim_registers<kConsumerRegisters>();
    Consumer(p, smem).run();
  }
}

}  // namespace sparge::hopper

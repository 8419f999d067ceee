// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (sm_90 and up): a kernel begins while the one launched before it ends, and waits by itself before
// it touches what that one writes. The host says which launches may (sparge/launch.py); after any other both do nothing.
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

constexpr bool kOverlapsLaunches = SPARGE_ARCH >= 90;

// Until the kernel launched before has ended and all that it wrote can be read. It has ended only when its own waits returned: so
// all kernels before it have ended, too, as long as some thread of each waits.
SPARGE_DEVICE void wait_for_launch_before() {
#if SPARGE_ARCH >= 90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may begin once every thread block has said so: each runs by then, none can be kept from its SM.
SPARGE_DEVICE void let_next_launch_begin() {
#if SPARGE_ARCH >= 90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace sparge::ptx

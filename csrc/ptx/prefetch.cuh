// SPDX-License-Identifier: Apache-2.0
// Hints for the caches: no result depends on them.
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

// The sector of 32 bytes around an address comes into the L2, and nothing waits for it.
SPARGE_DEVICE void prefetch_l2(const void* source) { asm volatile("prefetch.global.L2 [%0];" ::"l"(source)); }

}  // namespace sparge::ptx

// SPDX-License-Identifier: Apache-2.0
// Walks the set bits of a block map row in ascending order. The row is followed by one word of ones: blocks that lie
// past the last key, so the walk needs no bound and every block from `key_blocks` on means the end.
#pragma once

#include "../common/types.cuh"

namespace sparge::attend {

constexpr u32 kEndOfList = 0xFFFFFFFFu;

struct BlockList {
  const u32* words;
  i32 word = -1;
  u32 bits = 0;

  SPARGE_DEVICE explicit BlockList(const u32* map_words) : words(map_words) {}

  SPARGE_DEVICE i32 next() {
    while (bits == 0) bits = words[++word];
    const i32 bit = __ffs(bits) - 1;
    bits &= bits - 1;
    return word * kMapBits + bit;
  }
};

}  // namespace sparge::attend

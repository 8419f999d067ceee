// SPDX-License-Identifier: Apache-2.0
// Walks the set bits of a block map row in ascending order. The row is followed by one word of ones: blocks that lie
// past the last key, so the walk needs no bound and every block from `key_blocks` on means the end.
#pragma once

#include "../common/types.cuh"

namespace sparge::attend {

constexpr u32 kEndOfList = 0xFFFFFFFFu;

// Its state is one number, because the main loop has no register to spare: each step reads its word again.
struct BlockList {
  const u32* words;
  i32 last = -1;

  SPARGE_DEVICE explicit BlockList(const u32* map_words) : words(map_words) {}

  SPARGE_DEVICE i32 next() {
    const u32 first = last + 1;
    u32 word = first / kMapBits;
    u32 bits = words[word] & ~0u << first % kMapBits;
    while (bits == 0) bits = words[++word];
    return last = word * kMapBits + __ffs(bits) - 1;
  }
};

}  // namespace sparge::attend

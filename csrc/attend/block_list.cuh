// SPDX-License-Identifier: Apache-2.0
// Walks the set bits of a block map row in ascending order; -1 at the end.
#pragma once

#include "../common/types.cuh"

namespace sparge::attend {

struct BlockList {
  const u32* words;
  i32 word_count;
  i32 word = -1;
  u32 bits = 0;

  SPARGE_DEVICE BlockList(const u32* map_words, i32 count) : words(map_words), word_count(count) {}

  SPARGE_DEVICE i32 next() {
    while (bits == 0) {
      if (word + 1 >= word_count) return -1;
      bits = words[++word];
    }
    const i32 bit = __ffs(bits) - 1;
    bits &= bits - 1;
    return word * kMapBits + bit;
  }
};

}  // namespace sparge::attend

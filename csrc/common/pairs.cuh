// SPDX-License-Identifier: Apache-2.0
// How many query-key pairs a block holds: the unit in which density is counted.
#pragma once

#include "types.cuh"

namespace sparge {

// Pairs of all rows 0..row with `count` keys, when row r sees the first r + 1 of them. 32 bits are enough up to row 33 million.
SPARGE_DEVICE i32 causal_prefix(i32 row, i32 count) {
  if (row < 0) return 0;
  const i32 growing = smaller(row + 1, count);
  return growing * (growing + 1) / 2 + (row + 1 - growing) * count;
}

// Pairs of queries first_query .. first_query + rows - 1 with the `count` keys from first_key on.
SPARGE_DEVICE i32 block_pairs(bool causal, i32 first_query, i32 rows, i32 first_key, i32 count) {
  if (!causal) return rows * count;
  const i32 row = first_query - first_key;
  return causal_prefix(row + rows - 1, count) - causal_prefix(row - 1, count);
}

}  // namespace sparge

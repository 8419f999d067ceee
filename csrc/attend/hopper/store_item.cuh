// SPDX-License-Identifier: Apache-2.0
// What a consumer thread holds at the end of a work item, written out: an item has `out`, sums of channels, and `softmax`.
#pragma once

#include "rows.cuh"

namespace sparge::hopper {

template <typename Item>
SPARGE_DEVICE void store_facts(const AttendParams& p, const Item& item, const Queries& of, int half, i32 row) {
  if (quad_lane() == 0 && of.token[row] >= 0)
    attend::store_row_facts(p, of.work, of.token[row], item.softmax.reported(half), item.softmax.sum[half],
                            of.product_with_mean(row));
}

template <typename Item>
SPARGE_DEVICE void store_rows(const AttendParams& p, const Item& item, const Queries& of) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i32 row = first_row_anew() + 8 * half, token = of.token[row];
    store_facts(p, item, of, half, row);
    if (token < 0) continue;
    const attend::RowStore to(p, of.work, token, item.softmax.sum[half], of.inverse_contrast());
#pragma unroll
    for (int n = 0; n < kChannelTiles; ++n) {
      const i32 channel = 8 * n + 2 * quad_lane();
      const float* sums = item.out + 4 * n + 2 * half;
      to.store(channel, sums[0], sums[1], of.value(channel), of.value(channel + 1));
    }
  }
}

// Word i of lane t becomes word t of lane i.
SPARGE_DEVICE void transpose_quad(u32 (&word)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const bool upper = quad_lane() & step;
      const u32 other = __shfl_xor_sync(kFullWarp, upper ? word[i] : word[i + step], step);
      word[i] = upper ? other : word[i];
      word[i + step] = upper ? word[i + step] : other;
    }
}

// Four lanes have pairs of channels of a row each; they exchange them until each has 16 neighbouring bytes.
template <DType kType, typename Item>
SPARGE_DEVICE void store_whole_rows(const AttendParams& p, const Item& item, const Queries& of) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i32 row = first_row_anew() + 8 * half, token = of.token[row];
    store_facts(p, item, of, half, row);
    const attend::RowStore to(p, of.work, token, item.softmax.sum[half], of.inverse_contrast());
#pragma unroll
    for (int first = 0; first < kChannelTiles; first += 4) {
      u32 word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const i32 channel = 8 * (first + i) + 2 * quad_lane();
        const float* sums = item.out + 4 * (first + i) + 2 * half;
        word[i] = to.packed<kType>(sums[0], sums[1], of.value(channel), of.value(channel + 1));
      }
      transpose_quad(word);
      if (token >= 0) reinterpret_cast<Vec16*>(to.out)[first + quad_lane()] = {word[0], word[1], word[2], word[3]};
    }
  }
}

template <typename Item>
SPARGE_DEVICE void store_item(const AttendParams& p, const Item& item, const Queries& of) {
  if (!attend::RowStore::whole(p))
    store_rows(p, item, of);
  else if (p.out.dtype == DType::kBf16)
    store_whole_rows<DType::kBf16>(p, item, of);
  else
    store_whole_rows<DType::kFp16>(p, item, of);
}

// Pairs that the PV filter left out since the last item.
SPARGE_DEVICE void count_skips(const AttendParams& p, u32& pairs) {
  if (p.counters) atomicAdd(p.counters + kSkippedPairs, static_cast<u64>(pairs));
  pairs = 0;
}

}  // namespace sparge::hopper

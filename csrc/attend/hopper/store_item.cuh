// SPDX-License-Identifier: Apache-2.0
// Writes out what a consumer thread holds at the end of a work item: an item has `out`, sums of channels, and `softmax`.
#pragma once

#include "../../ptx/stmatrix.cuh"
#include "rows.cuh"

namespace sparge::hopper {

template <typename Item>
SPARGE_DEVICE void store_facts(const AttendParams& p, const Item& item, const Queries& of, int half, i32 row) {
  if (quad_lane_anew() == 0 && of.token[row] >= 0)
    attend::store_row_facts(p, of.work, of.token[row], item.softmax.reported(half), item.softmax.sum[half],
                            [&] { return of.facts(row); });
}

template <typename Item>
SPARGE_DEVICE void store_rows(const AttendParams& p, const Item& item, const Queries& of) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i32 quad = quad_lane_anew(), row = first_row_anew() + 8 * half, token = of.token[row];
    store_facts(p, item, of, half, row);
    if (token < 0) continue;
    const attend::RowStore to(p, of.work, token, item.softmax.sum[half], of.inverse_output_scale());
#pragma unroll
    for (int n = 0; n < kChannelTiles; ++n) {
      const i32 channel = 8 * n + 2 * quad;
      const float* sums = item.out + 4 * n + 2 * half;
      to.store(channel, sums[0], sums[1], of.value(channel), of.value(channel + 1));
    }
  }
}

// Four lanes share a row and have pairs of its channels. They exchange them, four tiles at a time: 16 neighbouring bytes a lane.
template <DType kType, typename Item>
SPARGE_DEVICE void store_whole_rows(const AttendParams& p, const Item& item, const Queries& of, Exchange& exchange) {
  const i32 lane = ptx::thread_index() % kWarpSize, quad = lane % 4, row = first_row_anew();
  const u32 mine = Exchange::offset(lane / Exchange::kRows, lane % Exchange::kRows), whole = Exchange::offset(quad, lane / 4);
  const i32 token[2] = {of.token[row], of.token[row + 8]};
  const attend::RowStore rows[2] = {{p, of.work, token[0], item.softmax.sum[0], of.inverse_output_scale()},
                                    {p, of.work, token[1], item.softmax.sum[1], of.inverse_output_scale()}};
#pragma unroll
  for (int half = 0; half < 2; ++half) store_facts(p, item, of, half, row + 8 * half);
#pragma unroll
  for (int first = 0; first < kChannelTiles; first += Exchange::kTiles) {
    attend::Value low[Exchange::kTiles], high[Exchange::kTiles];  // loaded once for both rows: no load moves past the exchange
#pragma unroll
    for (int i = 0; i < Exchange::kTiles; ++i) {
      const i32 channel = 8 * (first + i) + 2 * quad;
      low[i] = of.value(channel), high[i] = of.value(channel + 1);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 word[Exchange::kTiles];
#pragma unroll
      for (int i = 0; i < Exchange::kTiles; ++i) {
        const float* sums = item.out + 4 * (first + i) + 2 * half;
        word[i] = rows[half].packed<kType>(sums[0], sums[1], low[i], high[i]);
      }
      ptx::stmatrix_x4(ptx::shared_address(exchange.half[half] + mine), word);
      __syncwarp();
      if (token[half] >= 0)
        reinterpret_cast<Vec16*>(rows[half].out)[first + quad] = *reinterpret_cast<const Vec16*>(exchange.half[half] + whole);
    }
  }
}

template <typename Item>
SPARGE_DEVICE void store_item(const AttendParams& p, const Item& item, const Queries& of, Exchange& exchange) {
  if (!attend::RowStore::whole(p))
    store_rows(p, item, of);
  else if (p.out.dtype == DType::kBf16)
    store_whole_rows<DType::kBf16>(p, item, of, exchange);
  else
    store_whole_rows<DType::kFp16>(p, item, of, exchange);
}

// Pairs that the PV filter left out since the last item.
SPARGE_DEVICE void count_skips(const AttendParams& p, u32& pairs) {
  if (p.counters) atomicAdd(p.counters + kSkippedPairs, static_cast<u64>(pairs));
  pairs = 0;
}

}  // namespace sparge::hopper

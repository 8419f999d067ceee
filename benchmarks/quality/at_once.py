# SPDX-License-Identifier: Apache-2.0
"""Attention of a whole call in few large products, for sampling runs of a model.

The arithmetic is that of `sparge.reference.pooled.attend_packed`, which walks block by block, but
for one thing: P is rounded relative to a row's last maximum and not to the running one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparge.blocks import KEY_BLOCK, QUERY_BLOCK
from sparge.reference.arithmetic import ARITHMETIC, Arithmetic
from sparge.reference.attend import LOG2_E
from sparge.reference.packed import Packed
from sparge.reference.partial import NO_LOGIT, Partial, finite
from sparge.reference.quantize import int8_levels, int8_scale

BLOCKS_AT_ONCE = 32  # query blocks: logits of 21,000 keys then take 340 MB


def attend_at_once(
    packed: Packed,
    kept: Tensor,
    pooled: Tensor,
    gain: Tensor,
    *,
    scale: float,
) -> Partial:
    """Attention by slot over the blocks `kept`, and over `pooled` as pseudo-keys counted gain (H,)
    times.

    Both maps are (B, H, nq, nk) bool. The packing is an 8-bit one, not causal.
    """
    operands = packed.operands
    group = operands.heads // operands.kv_heads
    rows = [
        [
            _Head.of(packed, b, h // group, gain[h]).attend(
                _by_block(operands.q_levels[b, h].float(), QUERY_BLOCK),
                _by_block(operands.q_scale[b, h].unsqueeze(-1), QUERY_BLOCK) * (scale * LOG2_E),
                kept[b, h],
                pooled[b, h],
            )
            for h in range(operands.heads)
        ]
        for b in range(operands.batch)
    ]
    sums, row_max, row_sum = (
        torch.stack([torch.stack([head[part] for head in heads]) for heads in rows])
        for part in range(3)
    )
    queries = operands.n_queries
    return Partial(sums[:, :, :queries], row_max[:, :, :queries], row_sum[:, :, :queries])


@dataclass(frozen=True, eq=False)
class _Head:
    """Keys of one KV head, and a pseudo-key a block, for one query head."""

    k: Tensor  # (nk, 64, D) levels
    v: Tensor  # (nk, 64, D) levels
    k_scale: Tensor  # (nk,)
    counts: Tensor  # (nk,) keys
    pool_k: Tensor  # (nk, D) levels
    pool_v: Tensor  # (nk, D) levels
    pool_scale: Tensor  # (nk,)
    pool_bias: Tensor  # (nk,) log2 of keys times gain
    v_scale: Tensor  # (D,)
    vbar: Tensor  # (D,)
    arithmetic: Arithmetic

    @classmethod
    def of(cls, packed: Packed, b: int, h: int, gain: Tensor) -> _Head:
        operands = packed.operands
        arithmetic = ARITHMETIC[operands.element]
        mean, v_scale = operands.k_block_mean[b, h], operands.v_scale[b, h]
        largest = mean.abs().amax(-1)
        counts = operands.key_counts[b]
        return cls(
            _by_block(operands.k_levels[b, h].float(), KEY_BLOCK),
            _by_block(operands.v_levels[b, h].float(), KEY_BLOCK),
            operands.k_scale[b, h],
            counts,
            int8_levels(mean, largest.unsqueeze(-1)).float(),
            arithmetic.round(packed.v_block_mean[b, h] / v_scale).float(),
            int8_scale(largest),
            (counts * gain.to(counts.device)).log2(),
            v_scale,
            operands.vbar[b, h],
            arithmetic,
        )

    def attend(
        self, q: Tensor, factors: Tensor, kept: Tensor, pooled: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attends from q (nq, 128, D), factors (nq, 128, 1), maps (nq, nk): rows of sums, maxima,
        row sums."""
        parts = [
            self._attend(*part)
            for part in zip(
                *(x.split(BLOCKS_AT_ONCE) for x in (q, factors, kept, pooled)), strict=True
            )
        ]
        sums, row_max, row_sum = (torch.cat(rows) for rows in zip(*parts, strict=True))
        return sums.flatten(0, 1), row_max.flatten(), row_sum.flatten()

    def _attend(
        self, q: Tensor, factors: Tensor, kept: Tensor, pooled: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        most = int(kept.sum(-1).amax())
        blocks = kept.byte().argsort(dim=-1, descending=True, stable=True)[:, :most]
        place = torch.arange(KEY_BLOCK, device=q.device)
        visible = kept.gather(1, blocks).unsqueeze(-1) & (place < self.counts[blocks].unsqueeze(-1))
        scales = self.k_scale[blocks].repeat_interleave(KEY_BLOCK, -1).unsqueeze(1)
        logits = q @ self.k[blocks].flatten(1, 2).mT * (factors * scales)
        logits = logits.masked_fill(~visible.flatten(1).unsqueeze(1), NO_LOGIT)
        values = self.v[blocks].flatten(1, 2)
        if pooled.any():
            more = q @ self.pool_k.T * (factors * self.pool_scale) + self.pool_bias
            more = more.masked_fill(~pooled.unsqueeze(1), NO_LOGIT)
            logits = torch.cat([logits, more], -1)
            values = torch.cat([values, self.pool_v.expand(len(values), -1, -1)], 1)
        top = logits.amax(-1)
        p = torch.exp2(logits - finite(top).unsqueeze(-1))
        row_sum = p.sum(-1)
        peak = self.arithmetic.p_peak
        sums = self.arithmetic.round(p * peak).float() @ values / peak
        return sums * self.v_scale + row_sum.unsqueeze(-1) * self.vbar, top, row_sum


def _by_block(rows: Tensor, size: int) -> Tensor:
    """(N, ...) to (blocks, size, ...), zeros at the end."""
    return pad(rows, (0, 0, 0, -rows.shape[0] % size)).unflatten(0, (-1, size))

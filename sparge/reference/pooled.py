# SPDX-License-Identifier: Apache-2.0
"""Stage attend with pooled keys, in the arithmetic of the kernels.

A dropped block takes part in the softmax as one pseudo-key: its mean key, with the weight of all
its keys times the pool weight of the head, and its mean value. Pseudo-keys come last, in tiles of
64, and no filter leaves them out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import KEY_BLOCK, QUERY_BLOCK
from ..policy import PV_FILTER_OFF, PerHead
from .arithmetic import ARITHMETIC, Arithmetic
from .attend import PORTABLE_SOFTMAX, Attended, Head, OnlineSoftmax, log_sum_exp
from .packed import Packed
from .partial import NO_LOGIT, Partial, finite
from .quantize import Quantized, int8_levels, int8_scale

POOL_TILE = 64  # pseudo-keys in a tile, which is shaped like a key block


def attend_packed(
    packed: Packed,
    kept: Tensor,
    pooled: Tensor | None = None,
    pool_weight: Tensor | float = 1.0,
    *,
    output_scale: Tensor | float = 1.0,
    scale: float,
    is_causal: bool = False,
    pvthreshd: PerHead = PV_FILTER_OFF,
    softmax: OnlineSoftmax = PORTABLE_SOFTMAX,
) -> Attended:
    """Attention over the blocks `kept` (B, H, nq, nk) bool, by slot where `packed` has an order.

    pooled: (B, H, nq, nk) bool, the dropped blocks that stand as pseudo-keys, each key counted
        `pool_weight` times (one number, or (H,)). Tiles of pseudo-keys count as kept blocks do in
        `softmax`.
    output_scale: one number, or (H,): output scale of `out` alone (`with_output_scale`).

    Rows of empty slots hold nothing of meaning.
    """
    operands = packed.operands
    shape, device = operands.q_levels.shape, operands.q_levels.device
    thresholds = (
        torch.as_tensor(pvthreshd, dtype=torch.float32, device="cpu").expand(shape[1]).tolist()
    )
    pool_weights = torch.as_tensor(pool_weight, dtype=torch.float32, device=device).expand(shape[1])
    unnormalised = torch.zeros(shape, dtype=torch.float32, device=device)
    row_max = torch.full(shape[:3], NO_LOGIT, dtype=torch.float32, device=device)
    row_sum = torch.zeros(shape[:3], dtype=torch.float32, device=device)
    pv_skipped = torch.zeros(shape[:2], dtype=torch.int64, device=device)
    group = operands.heads // operands.kv_heads
    for b in range(shape[0]):
        for h in range(shape[1]):
            head = _PackedHead.of_packed(packed, b, h // group, is_causal, softmax)
            pool = _Pool.of(packed, b, h // group, pool_weights[h], softmax)
            for i in range(kept.shape[2]):
                rows = slice(i * QUERY_BLOCK, min((i + 1) * QUERY_BLOCK, shape[2]))
                q = operands.q_levels[b, h, rows].float()
                factors = operands.row_factors(b, h, rows, scale)
                part = Partial(unnormalised[b, h, rows], row_max[b, h, rows], row_sum[b, h, rows])
                blocks = kept[b, h, i].nonzero().squeeze(-1)
                if blocks.numel():
                    *sums, skipped = head.attend(q, factors, rows.start, blocks, thresholds[h])
                    part = Partial(*sums)
                    pv_skipped[b, h] += skipped
                if pooled is not None and pooled[b, h, i].any():
                    part = part.plus(pool.attend(q, factors, pooled[b, h, i], part.row_max))
                unnormalised[b, h, rows] = part.unnormalised
                row_max[b, h, rows] = part.row_max
                row_sum[b, h, rows] = part.row_sum
    whole = Partial(unnormalised, row_max, row_sum)
    out = with_output_scale(whole.output(), row_sum, operands, kept, output_scale)
    lse = log_sum_exp(operands, row_max, row_sum, scale)
    return Attended(out, lse, row_max, row_sum, unnormalised, pv_skipped)


def with_output_scale(
    out: Tensor, row_sum: Tensor, operands: Quantized, kept: Tensor, output_scale: Tensor | float
) -> Tensor:
    """Scales the distance of out (B, H, Nq, D) from the mean value by `output_scale` ((H,) or one
    number), in query blocks that drop something. Rows that met no key (row_sum 0) stay 0."""
    factor = torch.as_tensor(output_scale, dtype=torch.float32, device=kept.device)
    if (factor == 1).all():
        return out
    of_block = factor.expand(operands.heads)[:, None].masked_fill(~_drops(operands, kept), 1)
    rows = torch.arange(operands.n_queries, device=kept.device) // QUERY_BLOCK
    of_row = of_block[..., rows].masked_fill(row_sum == 0, 1).unsqueeze(-1)
    return torch.lerp(_mean_value(operands).expand_as(out), out, of_row.expand_as(out))


def _drops(operands: Quantized, kept: Tensor) -> Tensor:
    """(B, H, nq) bool: whether any block that holds keys is not kept."""
    return ((operands.key_counts > 0)[:, None, None] & ~kept).any(-1)


def _mean_value(operands: Quantized) -> Tensor:
    """(B, H, 1, D): mean value."""
    return operands.vbar.repeat_interleave(operands.heads // operands.kv_heads, 1).unsqueeze(2)


@dataclass(frozen=True, eq=False)
class _PackedHead(Head):
    """Keys and values of one KV head, where any block may be ragged and any slot empty."""

    counts: Tensor  # (nk,)
    occupied: Tensor  # (Nq,) bool: the others have no say in the PV filter

    @classmethod
    def of_packed(
        cls, packed: Packed, b: int, h: int, is_causal: bool, softmax: OnlineSoftmax
    ) -> _PackedHead:
        operands, arithmetic = packed.operands, ARITHMETIC[packed.operands.element]
        counts = operands.key_counts[b]
        head = Head.of(operands, b, h, arithmetic, int(counts.sum()), is_causal, softmax)
        return cls(**vars(head), counts=counts, occupied=packed.occupied)

    def _visible(self, rows: int, first_row: int, blocks: Tensor) -> Tensor:
        place = torch.arange(KEY_BLOCK, device=blocks.device)
        row = first_row + torch.arange(rows, device=blocks.device)
        visible = (place < self.counts[blocks].unsqueeze(-1)) & self.occupied[row, None, None]
        if self.is_causal:
            return visible & (blocks.unsqueeze(-1) * KEY_BLOCK + place <= row[:, None, None])
        return visible


@dataclass(frozen=True, eq=False)
class _Pool:
    """Pseudo-keys of all blocks for one query head, as float32."""

    k: Tensor  # (nk, D) levels
    k_scale: Tensor  # (nk,), one a pseudo-key
    bias: Tensor  # (nk,) log2 of keys times pool weight
    v: Tensor  # (nk, D) levels
    v_scale: Tensor  # (D,)
    vbar: Tensor  # (D,)
    arithmetic: Arithmetic
    softmax: OnlineSoftmax

    @classmethod
    def of(
        cls, packed: Packed, b: int, h: int, pool_weight: Tensor, softmax: OnlineSoftmax
    ) -> _Pool:
        operands, arithmetic = packed.operands, ARITHMETIC[packed.operands.element]
        mean, v_scale = operands.k_block_mean[b, h], operands.v_scale[b, h]
        if arithmetic.quantized_qk:
            largest = mean.abs().amax(-1)
            scale = int8_scale(largest)
            levels = int8_levels(mean, largest.unsqueeze(-1))
        else:
            scale, levels = torch.ones_like(mean[:, 0]), arithmetic.round(mean)
        return cls(
            levels.float(),
            scale,
            (operands.key_counts[b] * pool_weight).log2(),
            arithmetic.round(packed.v_block_mean[b, h] / v_scale).float(),
            v_scale,
            operands.vbar[b, h],
            arithmetic,
            softmax,
        )

    def attend(self, q: Tensor, factors: Tensor, pooled: Tensor, start: Tensor) -> Partial:
        """Rows q (R, D) over the blocks `pooled` (nk,) bool; `start` (R,): maximum met before."""
        logits = q @ self.k.T * (factors.unsqueeze(-1) * self.k_scale) + self.bias
        logits = logits.masked_fill(~pooled, NO_LOGIT)
        step = self.softmax.step_blocks * POOL_TILE
        spare = -logits.shape[1] % step
        tiles = pad(logits, (0, spare), value=NO_LOGIT).unflatten(-1, (-1, step))
        running = torch.maximum(tiles.amax(-1).cummax(-1).values, start.unsqueeze(-1))
        rescale = torch.exp2(running - finite(running[:, -1:])).unsqueeze(-1)
        exponents = tiles - finite(running).unsqueeze(-1)
        stored, sums = self.softmax.weigh(exponents, self.arithmetic)
        row_sum = (sums * rescale).sum((-2, -1))
        stored = stored * rescale
        acc = stored.flatten(1) @ pad(self.v, (0, 0, 0, spare)) / self.arithmetic.p_peak
        return Partial(
            acc * self.v_scale + row_sum.unsqueeze(-1) * self.vbar, running[:, -1], row_sum
        )

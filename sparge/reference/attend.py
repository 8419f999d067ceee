# SPDX-License-Identifier: Apache-2.0
"""Stage attend: softmax attention over kept blocks and pooled keys, in the kernels' arithmetic.

The kernels walk the kept key blocks in ascending order and rescale their sums whenever the running
maximum grows. Here the running maxima are found first, each block's P is rounded relative to the
maximum it met, and the sums are brought to the final maximum by one factor a block. That is the
same arithmetic, up to float32 rounding, without a loop over key blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import KEY_BLOCK, QUERY_BLOCK
from ..policy import PV_FILTER_OFF, PerHead
from .arithmetic import ARITHMETIC, LOG2_E, PORTABLE_SOFTMAX, OnlineSoftmax, Values
from .partial import NO_LOGIT, Partial, finite
from .pooled import Pool, with_output_scale
from .quantized import Quantized, blocked

PV_GROUP = 64  # query rows that agree before the PV filter skips a block for them


@dataclass(frozen=True, eq=False)
class Attended:
    """Result of attention, in float32, all (B, H, Nq) or (B, H, Nq, D).

    out: 0 for rows that see no key. lse: natural log-sum-exp of the true logits, -inf for them.
    row_max: m, largest centred logit in log2 units. row_sum: l, sum over pairs of exp2(s - m).
    unnormalised: sum over pairs of exp2(s - m) v, so that out = unnormalised / l where there is no
    output scale. pv_skipped: (B, H) int64, query-key pairs whose exp and PV the filter left out.
    """

    out: Tensor
    lse: Tensor
    row_max: Tensor
    row_sum: Tensor
    unnormalised: Tensor
    pv_skipped: Tensor


def attend(
    x: Quantized,
    kept: Tensor,
    pooled: Tensor | None = None,
    pool_weight: PerHead = 1.0,
    *,
    output_scale: PerHead = 1.0,
    scale: float,
    is_causal: bool = False,
    pvthreshd: PerHead = PV_FILTER_OFF,
    softmax: OnlineSoftmax = PORTABLE_SOFTMAX,
) -> Attended:
    """Attention over the blocks `kept` (B, H, nq, nk) bool, by slot where `x` has an order.

    pooled: (B, H, nq, nk) bool, the dropped blocks that stand as pseudo-keys, each key counted
        `pool_weight` times. Tiles of pseudo-keys count as kept blocks do in `softmax`.
    output_scale: that of `out` alone (`with_output_scale`).

    Rows of empty slots hold nothing of meaning.
    """
    shape, device = x.q_levels.shape, x.q_levels.device
    thresholds = (
        torch.as_tensor(pvthreshd, dtype=torch.float32, device="cpu").expand(shape[1]).tolist()
    )
    pool_weights = torch.as_tensor(pool_weight, dtype=torch.float32, device=device).expand(shape[1])
    unnormalised = torch.zeros(shape, dtype=torch.float32, device=device)
    row_max = torch.full(shape[:3], NO_LOGIT, dtype=torch.float32, device=device)
    row_sum = torch.zeros(shape[:3], dtype=torch.float32, device=device)
    pv_skipped = torch.zeros(shape[:2], dtype=torch.int64, device=device)
    for b in range(shape[0]):
        for h in range(shape[1]):
            kv_head = h * x.kv_heads // x.heads
            of_values = x.v_scale[b, kv_head], x.vbar[b, kv_head]
            values = Values(*of_values, ARITHMETIC[x.element], softmax)
            head = _Head.of(x, b, kv_head, values, is_causal)
            pool = None if pooled is None else Pool.of(x, b, kv_head, values, pool_weights[h])
            for i in range(kept.shape[2]):
                rows = slice(i * QUERY_BLOCK, min((i + 1) * QUERY_BLOCK, shape[2]))
                q = x.q_levels[b, h, rows].float()
                factors = x.row_factors(b, h, rows, scale)
                part = Partial(unnormalised[b, h, rows], row_max[b, h, rows], row_sum[b, h, rows])
                blocks = kept[b, h, i].nonzero().squeeze(-1)
                if blocks.numel():
                    part, skipped = head.attend(q, factors, rows.start, blocks, thresholds[h])
                    pv_skipped[b, h] += skipped
                if pool is not None and pooled is not None and pooled[b, h, i].any():
                    part = part.plus(pool.attend(q, factors, pooled[b, h, i], part.row_max))
                unnormalised[b, h, rows] = part.unnormalised
                row_max[b, h, rows] = part.row_max
                row_sum[b, h, rows] = part.row_sum
    whole = Partial(unnormalised, row_max, row_sum)
    out = with_output_scale(whole.output(), row_sum, x, kept, output_scale)
    lse = (row_max + row_sum.log2()) / LOG2_E + x.q_dot_kbar * scale
    lse = torch.where(row_sum == 0, NO_LOGIT, lse)
    return Attended(out, lse, row_max, row_sum, unnormalised, pv_skipped)


@dataclass(frozen=True, eq=False)
class _Head:
    """Keys and values of one KV head, by key block, as float32."""

    k: Tensor  # (nk, 64, D) levels
    k_scale: Tensor  # (nk,)
    v: Tensor  # (nk, 64, D) in units of the channels' scales
    values: Values
    counts: Tensor  # (nk,) keys of each block
    occupied: Tensor | None  # (Nq,) bool, in an order: the others have no say in the PV filter
    is_causal: bool

    @classmethod
    def of(cls, x: Quantized, b: int, h: int, values: Values, is_causal: bool) -> _Head:
        return cls(
            blocked(x.k_levels[b, h].float(), KEY_BLOCK),
            x.k_scale[b, h],
            blocked(x.v_levels[b, h].float(), KEY_BLOCK) * x.v_block_scale[b, h, :, None, None],
            values,
            x.key_counts[b],
            None if x.order is None else x.occupied,
            is_causal,
        )

    def attend(
        self, q: Tensor, factors: Tensor, first_row: int, blocks: Tensor, threshold: float
    ) -> tuple[Partial, Tensor | int]:
        """Rows q (R, D) over `blocks` (n,), and the number of skipped pairs."""
        visible = self._visible(q.shape[0], first_row, blocks)
        logits = (q @ self.k[blocks].flatten(0, 1).T).unflatten(-1, (-1, KEY_BLOCK))
        logits = logits * (factors.unsqueeze(-1) * self.k_scale[blocks]).unsqueeze(-1)
        logits = logits.masked_fill_(~visible, NO_LOGIT)

        block_max = logits.amax(-1)
        running = block_max.cummax(-1).values
        reference = running[:, _step_ends(blocks, self.values.softmax.step_blocks)]
        exponents = logits.sub_(finite(reference).unsqueeze(-1))
        skipped = 0
        if threshold < PV_FILTER_OFF:
            skip = _pv_filter(block_max, running, threshold)
            exponents.masked_fill_(skip.unsqueeze(-1), NO_LOGIT)
            skipped = (visible.sum(-1) * skip).sum()
        # All logits of a row may have overflowed downwards: its softmax is no number either.
        lost = (running[:, -1] == NO_LOGIT) & visible.any(-1).any(-1)
        return self.values.sums(exponents, reference, self.v[blocks].flatten(0, 1), lost), skipped

    def _visible(self, rows: int, first_row: int, blocks: Tensor) -> Tensor:
        """(R or 1, n, 64): whether the pair exists, for its key is valid and not after its
        query."""
        place = torch.arange(KEY_BLOCK, device=blocks.device)
        row = (first_row + torch.arange(rows, device=blocks.device))[:, None, None]
        visible = (place < self.counts[blocks].unsqueeze(-1)).unsqueeze(0)
        if self.occupied is not None:
            visible = visible & self.occupied[row]
        if self.is_causal:
            visible = visible & (blocks.unsqueeze(-1) * KEY_BLOCK + place <= row)
        return visible


def _step_ends(blocks: Tensor, step_blocks: int) -> Tensor:
    """(n,): for each of `blocks` (n,) the position of the last block of its step."""
    position = torch.arange(blocks.numel(), device=blocks.device)
    ends = (position // step_blocks + 1) * step_blocks - 1
    return ends.clamp(max=blocks.numel() - 1)


def _pv_filter(block_max: Tensor, running: Tensor, threshold: float) -> Tensor:
    """(R, n): blocks so far below the maximum before them that all 64 rows around leave them out.

    A row that has met no key yet lets a block be skipped only if the block has none for it either;
    the first block is never skipped.
    """
    rows = block_max.shape[0]
    before = pad(running[:, :-1], (1, 0), value=NO_LOGIT)
    negligible = (block_max - before < -threshold) | (block_max == NO_LOGIT)
    groups = pad(negligible, (0, 0, 0, -rows % PV_GROUP), value=True).unflatten(0, (-1, PV_GROUP))
    skip = groups.all(1)
    skip[:, 0] = False
    return skip.repeat_interleave(PV_GROUP, 0)[:rows]

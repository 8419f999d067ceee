# SPDX-License-Identifier: Apache-2.0
"""Stage attend: softmax attention over the kept blocks, in the arithmetic of the kernels.

The kernels walk the kept key blocks in ascending order and rescale their sums whenever the running
maximum grows. Here the running maxima are found first, each block's P is rounded relative to the
maximum it met, and the sums are brought to the final maximum by one factor a block. That is the
same arithmetic, up to float32 rounding, without a loop over key blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import KEY_BLOCK, QUERY_BLOCK, BlockPlan
from ..policy import PV_FILTER_OFF, PerHead
from .arithmetic import ARITHMETIC, Arithmetic
from .fixed_exp2 import fixed_exp2, is_fixed
from .partial import NO_LOGIT, Partial, finite
from .quantize import LOG2_E, Quantized

PV_GROUP = 64  # query rows that agree before the PV filter skips a block for them


@dataclass(frozen=True)
class OnlineSoftmax:
    """Differences between the softmaxes of the attend kernels; the defaults are those of
    mma.sync.
    """

    step_blocks: int = 1
    """Kept blocks after which the running maximum is taken; P is rounded relative to it."""
    sums_rounded: bool = False
    """Whether the row sums are of P as it was rounded: the tensor cores add them beside the
    values.
    """
    fixed_exp2: bool = False
    """Whether P of some keys of a step is computed in fixed point
    (`sparge.reference.fixed_exp2`).
    """

    def weigh(self, x: Tensor, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
        """P = 2^x as it is stored, in units of 1 / p_peak, and its sums; x is (..., keys)."""
        p = torch.exp2(x)
        exact = p * arithmetic.p_peak
        if self.fixed_exp2:
            fixed = fixed_exp2(x + math.log2(arithmetic.p_peak)).float()
            exact = torch.where(is_fixed(x.shape[-1], x.device), fixed, exact)
        stored = arithmetic.round(exact).float()
        if not self.sums_rounded:
            return stored, p.sum(-1, keepdim=True)
        return stored, stored.sum(-1, keepdim=True) / arithmetic.p_peak


PORTABLE_SOFTMAX = OnlineSoftmax()
#: Softmaxes of the sm_90a kernels, of 8-bit and of 16-bit operands.
HOPPER_SOFTMAX = OnlineSoftmax(step_blocks=2, sums_rounded=True, fixed_exp2=True)
HOPPER_SOFTMAX_16 = OnlineSoftmax(step_blocks=2)


@dataclass(frozen=True, eq=False)
class Attended:
    """Result of attention, in float32, all (B, H, Nq) or (B, H, Nq, D).

    out: 0 for rows that see no key. lse: natural log-sum-exp of the true logits, -inf for them.
    row_max: m, largest centred logit in log2 units. row_sum: l, sum over pairs of exp2(s - m).
    unnormalised: sum over pairs of exp2(s - m) v, so that out = unnormalised / l. pv_skipped: (B,
    H) int64, query-key pairs whose exp and PV the filter left out.
    """

    out: Tensor
    lse: Tensor
    row_max: Tensor
    row_sum: Tensor
    unnormalised: Tensor
    pv_skipped: Tensor


def attend(
    quantized: Quantized,
    plan: BlockPlan,
    *,
    scale: float,
    pvthreshd: PerHead = PV_FILTER_OFF,
    softmax: OnlineSoftmax = PORTABLE_SOFTMAX,
) -> Attended:
    """Attention over the blocks of `plan`, element by element causal when the plan is."""
    arithmetic = ARITHMETIC[quantized.element]
    shape = quantized.q_levels.shape
    device = quantized.q_levels.device
    thresholds = (
        torch.as_tensor(pvthreshd, dtype=torch.float32, device="cpu").expand(shape[1]).tolist()
    )
    unnormalised = torch.zeros(shape, dtype=torch.float32, device=device)
    row_max = torch.full(shape[:3], NO_LOGIT, dtype=torch.float32, device=device)
    row_sum = torch.zeros(shape[:3], dtype=torch.float32, device=device)
    pv_skipped = torch.zeros(shape[:2], dtype=torch.int64, device=device)
    group = quantized.heads // quantized.kv_heads
    kept = plan.kept()

    for b in range(shape[0]):
        keys = int(quantized.key_counts[b].sum())
        for h in range(shape[1]):
            head = Head.of(quantized, b, h // group, arithmetic, keys, plan.is_causal, softmax)
            for block in range(plan.query_blocks):
                blocks = kept[b, h, block].nonzero().squeeze(-1)
                if blocks.numel() == 0:
                    continue
                rows = slice(block * QUERY_BLOCK, min((block + 1) * QUERY_BLOCK, shape[2]))
                factors = quantized.row_factors(b, h, rows, scale)
                (
                    unnormalised[b, h, rows],
                    row_max[b, h, rows],
                    row_sum[b, h, rows],
                    skipped,
                ) = head.attend(
                    quantized.q_levels[b, h, rows].float(),
                    factors,
                    rows.start,
                    blocks,
                    thresholds[h],
                )
                pv_skipped[b, h] += skipped

    out = Partial(unnormalised, row_max, row_sum).output()
    lse = log_sum_exp(quantized, row_max, row_sum, scale)
    return Attended(out, lse, row_max, row_sum, unnormalised, pv_skipped)


def log_sum_exp(quantized: Quantized, row_max: Tensor, row_sum: Tensor, scale: float) -> Tensor:
    """(B, H, Nq): natural log-sum-exp of the true logits; -inf for rows that see no key."""
    lse = (row_max + row_sum.log2()) / LOG2_E + quantized.q_dot_kbar * scale
    return torch.where(row_sum == 0, NO_LOGIT, lse)


@dataclass(frozen=True, eq=False)
class Head:
    """Keys and values of one KV head, by key block, as float32."""

    k: Tensor  # (nk, 64, D) levels
    v: Tensor  # (nk, 64, D) levels
    k_scale: Tensor  # (nk,)
    v_scale: Tensor  # (D,)
    vbar: Tensor  # (D,)
    arithmetic: Arithmetic
    keys: int
    is_causal: bool
    softmax: OnlineSoftmax

    @classmethod
    def of(
        cls,
        quantized: Quantized,
        b: int,
        h: int,
        arithmetic: Arithmetic,
        keys: int,
        is_causal: bool,
        softmax: OnlineSoftmax,
    ) -> Head:
        return cls(
            _key_blocks(quantized.k_levels[b, h]),
            _key_blocks(quantized.v_levels[b, h]),
            quantized.k_scale[b, h],
            quantized.v_scale[b, h],
            quantized.vbar[b, h],
            arithmetic,
            keys,
            is_causal,
            softmax,
        )

    def attend(
        self, q: Tensor, factors: Tensor, first_row: int, blocks: Tensor, threshold: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | int]:
        """Rows q (R, D) over `blocks` (n,): unnormalised (R, D), m (R,), l (R,), skipped pairs."""
        visible = self._visible(q.shape[0], first_row, blocks)
        logits = (q @ self.k[blocks].flatten(0, 1).T).unflatten(-1, (-1, KEY_BLOCK))
        logits = logits * (factors.unsqueeze(-1) * self.k_scale[blocks]).unsqueeze(-1)
        logits = logits.masked_fill_(~visible, NO_LOGIT)

        block_max = logits.amax(-1)
        running = block_max.cummax(-1).values
        final = running[:, -1]
        reference = running[:, _step_ends(blocks, self.softmax.step_blocks)]
        exponents = logits.sub_(finite(reference).unsqueeze(-1))
        skipped = 0
        if threshold < PV_FILTER_OFF:
            skip = _pv_filter(block_max, running, threshold)
            exponents.masked_fill_(skip.unsqueeze(-1), NO_LOGIT)
            skipped = (visible.sum(-1) * skip).sum()

        rescale = torch.exp2(reference - finite(final).unsqueeze(-1)).unsqueeze(-1)
        stored, sums = self.softmax.weigh(exponents, self.arithmetic)
        row_sum = (sums * rescale).sum((-2, -1))
        stored.mul_(rescale)
        # All logits of a row may have overflowed downwards: its softmax is no number either.
        lost = (final == NO_LOGIT) & visible.any(-1).any(-1)
        row_sum = row_sum.masked_fill(lost, torch.nan)
        acc = stored.flatten(1) @ self.v[blocks].flatten(0, 1) / self.arithmetic.p_peak
        return acc * self.v_scale + row_sum.unsqueeze(-1) * self.vbar, final, row_sum, skipped

    def _visible(self, rows: int, first_row: int, blocks: Tensor) -> Tensor:
        """(R or 1, n, 64): whether the pair exists, for its key is valid and not after its
        query.
        """
        keys = blocks.unsqueeze(-1) * KEY_BLOCK + torch.arange(KEY_BLOCK, device=blocks.device)
        visible = (keys < self.keys).unsqueeze(0)
        if self.is_causal:
            row = first_row + torch.arange(rows, device=blocks.device)
            return visible & (keys <= row[:, None, None])
        return visible.expand(rows, -1, -1)


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


def _key_blocks(levels: Tensor) -> Tensor:
    values = levels.float()
    return pad(values, (0, 0, 0, -values.shape[0] % KEY_BLOCK)).unflatten(0, (-1, KEY_BLOCK))

# SPDX-License-Identifier: Apache-2.0
"""Stage attend in the kernels' arithmetic.

The kernels walk the kept key blocks in ascending order and rescale their sums whenever the running
maximum grows. Here the running maxima are found first, each block's P is rounded relative to the
maximum it met, and the sums are brought to the final maximum by one factor a block. That is the
same arithmetic, up to float32 rounding, without a loop over key blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparge.blocks import KEY_BLOCK, QUERY_BLOCK
from sparge.policy import PV_FILTER_OFF, PerHead
from sparge.reference import Attended
from sparge.reference.attend import LOG2_E, NO_LOGIT, pv_filter, visible_pairs
from sparge.reference.operands import block_means, by_query_head, in_blocks, per_head

from . import balance
from .arithmetic import (
    ARITHMETIC,
    E4M3_MAX,
    INT8_MAX,
    PORTABLE_SOFTMAX,
    OnlineSoftmax,
    finite,
)
from .quantize import Quantized, stored
from .sums import Partial, Values

LEAST_VALUE_SCALE = 2.0**-20
POOL_TILE = 64  # pseudo-keys in a tile, which is shaped like a key block


@dataclass(frozen=True, eq=False)
class Emulated(Attended):
    """row_max: (B, H, Nq), m, largest centred logit in log2 units. row_sum: (B, H, Nq), l, sum over
    pairs of exp2(s - m). unnormalised: (B, H, Nq, D), sum over pairs of exp2(s - m) v, so that
    out = unnormalised / l where there is no output scale.
    """

    row_max: Tensor
    row_sum: Tensor
    unnormalised: Tensor


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
) -> Emulated:
    """As `sparge.reference.attend`. Tiles of pseudo-keys count as kept blocks do in `softmax`."""
    shape, device = kept.shape[:3], kept.device
    pool_weights, output_scales, thresholds = (
        per_head(given, x.heads, device) for given in (pool_weight, output_scale, pvthreshd)
    )
    of_heads: list[Partial] = []
    off_mean: list[Tensor] = []
    pv_skipped = torch.zeros(shape[:2], dtype=torch.int64, device=device)
    for b, h in product(*map(range, shape[:2])):
        head, parts = _Head(x, b, h, softmax, scale), []
        for i in range(shape[2]):
            part, skipped = head.over_kept(i, kept[b, h, i], thresholds[h], is_causal)
            if pooled is not None and pooled[b, h, i].any():
                pseudo = head.over_pooled(i, pooled[b, h, i], pool_weights[h], part.row_max)
                part = part.plus(pseudo)
            parts.append(part)
            pv_skipped[b, h] += skipped
        of_heads.append(Partial.joined(torch.cat, parts))
        rows = x.q[b, h].flatten(0, 1)[: x.q_levels.shape[2]]
        off_mean.append(rows @ x.kbar[head.own] * scale)
    whole = Partial.joined(lambda of_head: torch.stack(of_head).unflatten(0, shape[:2]), of_heads)
    out, row_max, row_sum = whole.output(), whole.row_max, whole.row_sum
    if (output_scales != 1).any():
        drops = ((x.key_counts > 0)[:, None, None] & ~kept).any(-1)
        of_block = torch.where(drops, output_scales[:, None], 1)
        of_row = of_block.repeat_interleave(QUERY_BLOCK, -1)[..., : out.shape[2]]
        of_row = of_row.masked_fill(row_sum == 0, 1).unsqueeze(-1)
        mean = by_query_head(x.vbar, x.heads).unsqueeze(2)
        out = torch.lerp(mean.expand_as(out), out, of_row.expand_as(out))
    lse = (row_max + row_sum.log2()) / LOG2_E + torch.stack(off_mean).view_as(row_sum)
    lse = torch.where(row_sum == 0, NO_LOGIT, lse)
    by_row = (x.by_token(rows) for rows in (row_max, row_sum, whole.unnormalised))
    return Emulated(x.by_token(out), x.by_token(lse), pv_skipped, *by_row)


class _Head:
    """A query head and the keys and values that it reads, in float32."""

    def __init__(self, x: Quantized, b: int, h: int, softmax: OnlineSoftmax, scale: float) -> None:
        self.x = x
        self.own = own = b, h * x.kv_heads // x.heads
        self.values = Values(x.v_scale[own], x.vbar[own], ARITHMETIC[x.element], softmax)
        self.q = x.q_levels[b, h].float().split(QUERY_BLOCK)
        self.k = in_blocks(x.k_levels[own].float(), KEY_BLOCK)
        self.k_scale = x.k_scale[own]
        self.v = in_blocks(x.v_levels[own].float(), KEY_BLOCK) * x.v_block_scale[own][:, None, None]
        factors = x.q_scale[b, h] * (scale * LOG2_E)
        self.factors = torch.where(x.finite[own], factors, torch.nan).split(QUERY_BLOCK)

    def over_kept(
        self, i: int, kept: Tensor, threshold: Tensor, is_causal: bool
    ) -> tuple[Partial, Tensor | int]:
        """Query block i over its kept blocks (nk,) bool, and the number of skipped pairs."""
        q, blocks = self.q[i], kept.nonzero().squeeze(-1)
        if not blocks.numel():
            return Partial.of_no_key(len(q), self.v.shape[-1], q.device), 0
        filters = bool(threshold < PV_FILTER_OFF)
        entry, row = (torch.tensor([number], device=q.device) for number in (self.own[0], i))
        visible = visible_pairs(self.x, entry, row, blocks[None], is_causal, filters)[0, : len(q)]
        logits = (q @ self.k[blocks].flatten(0, 1).T).unflatten(-1, (-1, KEY_BLOCK))
        logits = logits * (self.factors[i].unsqueeze(-1) * self.k_scale[blocks]).unsqueeze(-1)
        logits = logits.masked_fill_(~visible, NO_LOGIT)

        block_max = logits.amax(-1)
        running = block_max.cummax(-1).values
        reference = running[:, _step_ends(blocks, self.values.softmax.step_blocks)]
        exponents = logits.sub_(finite(reference).unsqueeze(-1))
        skipped = 0
        if filters:
            of_block = pad(block_max, (0, 0, 0, QUERY_BLOCK - len(q)), value=NO_LOGIT)
            skip = pv_filter(of_block[None], threshold[None])[0, : len(q)]
            exponents.masked_fill_(skip.unsqueeze(-1), NO_LOGIT)
            skipped = (visible.sum(-1) * skip).sum()
        # All logits of a row may have overflowed downwards: its softmax is no number either.
        lost = (running[:, -1] == NO_LOGIT) & visible.any(-1).any(-1)
        return self.values.sums(exponents, reference, self.v[blocks].flatten(0, 1), lost), skipped

    def over_pooled(self, i: int, pooled: Tensor, pool_weight: Tensor, start: Tensor) -> Partial:
        """Query block i over pseudo-keys of the blocks `pooled` (nk,) bool. They come last, in
        tiles of 64, and no filter leaves them out. start (rows,): maximum met before."""
        k, k_scale, v, v_scale = self.pseudo_keys
        bias = (self.x.key_counts[self.own[0]] * pool_weight * v_scale).log2()
        logits = self.q[i] @ k.T * (self.factors[i].unsqueeze(-1) * k_scale) + bias
        logits = logits.masked_fill(~pooled, NO_LOGIT)

        step = self.values.softmax.step_blocks * POOL_TILE
        spare = -logits.shape[1] % step
        tiles = pad(logits, (0, spare), value=NO_LOGIT).unflatten(-1, (-1, step))
        running = torch.maximum(tiles.amax(-1).cummax(-1).values, start.unsqueeze(-1))
        exponents = tiles - finite(running).unsqueeze(-1)
        worth = pad(1 / v_scale, (0, spare), value=1).unflatten(0, (-1, step))
        return self.values.sums(exponents, running, pad(v, (0, 0, 0, spare)), worth=worth)

    @cached_property
    def pseudo_keys(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Levels of keys (nk, D) and their scales (nk,), values (nk, D) in units of the channels'
        scales times scales of their own (nk,): 1 where values are no integers."""
        x, arithmetic = self.x, self.values.arithmetic
        means = x.k_block_mean[self.own]
        if arithmetic.quantized_qk:
            means = balance.of_keys(means, balance.balance(x.extent[self.own]))
        levels, k_scale = stored(means.unsqueeze(1), arithmetic)
        v = block_means(x.v[self.own], x.key_counts[self.own[0]]) / self.values.scale
        v_scale, unit = torch.ones_like(k_scale), 1.0
        if arithmetic.integer_pv:
            v_scale = (v.abs().amax(-1) / E4M3_MAX).clamp(min=LEAST_VALUE_SCALE)
            unit = E4M3_MAX / INT8_MAX
        v = arithmetic.round(v / (v_scale.unsqueeze(-1) * unit)).float() * unit
        return levels.squeeze(1).float(), k_scale, v, v_scale


def _step_ends(blocks: Tensor, step_blocks: int) -> Tensor:
    """(n,): for each of `blocks` (n,) the position of the last block of its step."""
    position = torch.arange(blocks.numel(), device=blocks.device)
    ends = (position // step_blocks + 1) * step_blocks - 1
    return ends.clamp(max=blocks.numel() - 1)

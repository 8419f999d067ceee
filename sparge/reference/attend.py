# SPDX-License-Identifier: Apache-2.0
"""Stage attend: softmax attention over kept blocks and pooled keys, in float32.

A dropped block may take part as one pseudo-key: its mean key, with the weight of all its keys times
the pool weight of the head, and its mean value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import KEY_BLOCK, QUERY_BLOCK
from ..policy import PV_FILTER_OFF, PerHead
from .operands import Operands, per_head

LOG2_E = math.log2(math.e)
NO_LOGIT = -torch.inf
PV_GROUP = 64  # query rows that agree before the PV filter skips a block for them
BYTES_AT_ONCE = 1 << 24  # of the logits, keys and values of query blocks that go together


@dataclass(frozen=True, eq=False)
class Attended:
    """Result of attention, float32, in the order that the queries came in.

    out: (B, H, Nq, D), 0 for rows that see no key. lse: (B, H, Nq), natural log-sum-exp, -inf for
    them. pv_skipped: (B, H) int64, query-key pairs that the PV filter left out.
    """

    out: Tensor
    lse: Tensor
    pv_skipped: Tensor


def attend(
    x: Operands,
    kept: Tensor,
    pooled: Tensor | None = None,
    pool_weight: PerHead = 1.0,
    *,
    output_scale: PerHead = 1.0,
    scale: float,
    is_causal: bool = False,
    pvthreshd: PerHead = PV_FILTER_OFF,
) -> Attended:
    """Attention over the blocks `kept` (B, H, nq, nk) bool.

    pooled: (B, H, nq, nk) bool, the dropped blocks that stand as pseudo-keys, each key counted
        `pool_weight` times.
    output_scale: factor of the output's distance from the mean value, in query blocks that drop
        something.
    """
    shape = kept.shape[:3]
    pool_weights, output_scales, thresholds = (
        per_head(given, shape[1], kept.device) for given in (pool_weight, output_scale, pvthreshd)
    )
    call = _Call(x, kept, pooled, pool_weights, output_scales, scale, is_causal, thresholds)
    out = x.q.new_zeros(*shape, QUERY_BLOCK, x.v.shape[-1])
    lse = x.q.new_full((*shape, QUERY_BLOCK), NO_LOGIT)
    skipped = torch.zeros(shape, dtype=torch.int64, device=kept.device)
    counts = kept.sum(-1)
    for width in counts.unique().tolist():  # query blocks that keep as many blocks go together
        keys = width * KEY_BLOCK + (0 if pooled is None else kept.shape[-1])
        if keys == 0:
            continue
        size = 4 * keys * (QUERY_BLOCK + x.q.shape[-1] + x.v.shape[-1])
        for some in (counts == width).nonzero().split(max(1, BYTES_AT_ONCE // size)):
            place = some.unbind(-1)
            out[place], lse[place], skipped[place] = call.attend(width, *place)
    out, lse = (x.by_token(rows.flatten(2, 3)) for rows in (out, lse))
    return Attended(out, lse, skipped.sum(-1))


@dataclass(frozen=True, eq=False)
class _Call:
    x: Operands
    kept: Tensor
    pooled: Tensor | None
    pool_weights: Tensor
    output_scales: Tensor
    scale: float
    is_causal: bool
    thresholds: Tensor

    def attend(
        self, width: int, entry: Tensor, head: Tensor, block: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """out (C, 128, D), lse (C, 128) and the number of skipped pairs (C,) of query blocks that
        keep `width` blocks each: (C,) batch entries, heads and their numbers."""
        x, kept = self.x, self.kept[entry, head, block]
        of_keys = entry, head * x.kv_heads // x.heads
        queries = x.q[entry, head, block] * (self.scale * LOG2_E)
        queries = queries.masked_fill_(~x.finite[of_keys][:, None, None], torch.nan)

        blocks = kept.nonzero()[:, 1].view(len(block), width)
        own = of_keys[0].unsqueeze(-1), of_keys[1].unsqueeze(-1), blocks
        keys, values = x.k[own].flatten(1, 2), x.v[own].flatten(1, 2)
        visible = visible_pairs(x, entry, block, blocks, self.is_causal, self._filters)
        logits = (queries @ keys.mT).unflatten(-1, (width, KEY_BLOCK))
        logits = logits.masked_fill_(~visible, NO_LOGIT)
        skipped = torch.zeros_like(block)
        if width > 1 and self._filters:
            skip = pv_filter(logits.amax(-1), self.thresholds[head])
            logits = logits.masked_fill_(skip.unsqueeze(-1), NO_LOGIT)
            skipped = (visible.sum(-1) * skip).sum((-2, -1))
        logits, blind = logits.flatten(-2), ~visible.flatten(-2).any(-1)
        if self.pooled is not None:
            stands = self.pooled[entry, head, block].unsqueeze(1)
            weight = x.key_counts[entry] * self.pool_weights[head].unsqueeze(-1)
            pseudo = queries @ x.k_block_mean[of_keys].mT + weight.log2().unsqueeze(1)
            logits = torch.cat([logits, pseudo.masked_fill_(~stands, NO_LOGIT)], -1)
            values = torch.cat([values, x.v_block_mean[of_keys]], 1)
            blind = blind & ~stands.any(-1)

        most = logits.amax(-1, keepdim=True)  # of rows whose logits all overflowed -inf: NaN then
        weights = logits.sub_(most).exp2_()
        total = weights.sum(-1, keepdim=True)
        out = weights.div_(total) @ values
        drops = ((x.key_counts[entry] > 0) & ~kept).any(-1)
        out = out * torch.where(drops, self.output_scales[head], 1)[:, None, None]
        out = out + x.vbar[of_keys].unsqueeze(1)
        off_mean = queries @ x.kbar[of_keys].unsqueeze(-1)
        lse = (most + total.log2() + off_mean).squeeze(-1) / LOG2_E
        return out.masked_fill_(blind.unsqueeze(-1), 0), lse.masked_fill_(blind, NO_LOGIT), skipped

    @property
    def _filters(self) -> bool:
        return bool((self.thresholds < PV_FILTER_OFF).any())


def visible_pairs(
    x: Operands, entry: Tensor, block: Tensor, kept: Tensor, is_causal: bool, of_queries: bool
) -> Tensor:
    """(C, 128 or 1, n, 64) bool: pairs that exist, for the key is valid and not after its query.

    entry, block (C,): batch entries and numbers of query blocks. kept (C, n): their key blocks.
    of_queries: rows that are no queries see nothing, and so have no say in the PV filter.
    """
    places = torch.arange(KEY_BLOCK, device=kept.device)
    counts = x.key_counts[entry.unsqueeze(-1), kept]
    visible = (places < counts.unsqueeze(-1)).unsqueeze(1)
    if of_queries:
        visible = visible & x.occupied[block][..., None, None]
    if is_causal:
        rows = torch.arange(QUERY_BLOCK, device=kept.device)
        rows = block.unsqueeze(-1) * QUERY_BLOCK + rows
        keys = kept.unsqueeze(-1) * KEY_BLOCK + places
        visible = visible & (keys.unsqueeze(1) <= rows[..., None, None])
    return visible


def pv_filter(most: Tensor, thresholds: Tensor) -> Tensor:
    """(C, 128, n): blocks so far below the largest logit before them that all 64 rows around leave
    them out; most (C, 128, n) of each kept block, thresholds (C,) in log2 units.

    A row that has met no key yet lets a block be skipped only if the block has none for it either;
    the first block is never skipped.
    """
    before = pad(most.cummax(-1).values[..., :-1], (1, 0), value=NO_LOGIT)
    negligible = (most - before < -thresholds[:, None, None]) | (most == NO_LOGIT)
    skip = negligible.unflatten(1, (-1, PV_GROUP)).all(2)
    skip[..., 0] = False
    return skip.repeat_interleave(PV_GROUP, 1)

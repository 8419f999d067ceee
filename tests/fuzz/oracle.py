# SPDX-License-Identifier: Apache-2.0
"""Oracle of a call in float64, from the maths alone.

It has softmax over exactly the kept keys, and what the documentation says of pooled keys, output
scale and the PV filter. Which blocks are kept is given; `tests.fuzz.routing` judges
that. Nothing of `sparge.reference` is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparge import Precision
from tests.fuzz.draw import Case

QUERY_BLOCK, KEY_BLOCK, FILTER_ROWS = 128, 64, 64
LN2 = math.log(2)


@dataclass(frozen=True, eq=False)
class Setting:
    """A case in float64, keys and values by query head. Keys beyond the length are 0."""

    case: Case
    q: Tensor  # (B, H, Nq, D)
    k: Tensor  # (B, H, Nk, D)
    v: Tensor  # (B, H, Nk, D)
    valid: Tensor  # (B, Nk) bool
    q_slot: Tensor  # (H, Nq): where the token stands, by which blocks are cut
    k_slot: Tensor  # (H, Nk)
    query_blocks: int
    key_blocks: int

    @classmethod
    def of(cls, case: Case) -> Setting:
        q, k, v = (_read(case.heads_first(name)) for name in "qkv")
        batch, heads, queries, _ = q.shape
        keys, group = k.shape[2], heads // k.shape[1]
        tokens = torch.arange(keys, device=q.device)
        lengths = case.options.get("key_lengths")
        valid = (tokens >= 0).expand(batch, -1)
        if lengths is not None:
            valid = tokens < lengths.unsqueeze(-1)
        k, v = (x.masked_fill(~valid[:, None, :, None], 0) for x in (k, v))
        order = case.order
        if order is None:
            q_slot = torch.arange(queries, device=q.device).expand(heads, -1)
            k_slot = tokens.expand(heads, -1)
            query_blocks, key_blocks = -(-queries // QUERY_BLOCK), -(-keys // KEY_BLOCK)
        else:
            order_kind = torch.zeros(heads, dtype=torch.long)
            if case.head_settings is not None and case.head_settings.order_kind is not None:
                asked = case.head_settings.order_kind.cpu().long().view(-1, group)[:, :1]
                order_kind = asked.expand(-1, group).flatten().clamp(0, order.order_kinds - 1)
            q_slot = k_slot = order.token_slots.cpu()[order_kind].long().to(q.device)
            query_blocks, key_blocks = order.query_blocks, order.key_blocks
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return cls(case, q, k, v, valid, q_slot, k_slot, query_blocks, key_blocks)

    @property
    def eight_bit(self) -> bool:
        return self.case.policy.precision is not Precision.SIXTEEN_BIT

    @property
    def q_block(self) -> Tensor:
        return self.q_slot // QUERY_BLOCK

    @property
    def k_block(self) -> Tensor:
        return self.k_slot // KEY_BLOCK

    def mean(self, keys_or_values: Tensor) -> Tensor:
        """(B, H, 1, D) over the valid keys."""
        counts = self.valid.sum(-1).clamp(min=1)[:, None, None, None]
        return keys_or_values.sum(2, keepdim=True) / counts

    @property
    def key_centre(self) -> Tensor:
        """(B, H, 1, D): around what keys are quantized."""
        taken = self.eight_bit and self.case.policy.smooth_k
        return self.mean(self.k) * (1.0 if taken else 0.0)

    @property
    def channel_factors(self) -> Tensor:
        """(B, H, 1, D): what queries' channels are multiplied by and keys' divided on the way to
        INT8: a power of two near the root of how large the channel is in the keys, or 0 in heads
        whose largest root is at most 1.6 times the mean."""
        extent = (self.k - self.key_centre).masked_fill(~self.valid[:, None, :, None], 0)
        # Roots and powers as from the bits of float32: what is near one of their limits falls on
        # the same side.
        bits = extent.abs().amax(2, keepdim=True).float().view(torch.int32)
        roots = ((bits >> 1) + 0x1FC00000).view(torch.float32)
        most, mean = roots.amax(-1, keepdim=True), roots.mean(-1, keepdim=True)
        powers = (roots.maximum(most / 8).view(torch.int32) + 0x400000) & 0x7F800000
        return torch.where(most > 1.6 * mean, powers.view(torch.float32).double(), 0.0)

    @property
    def value_centre(self) -> Tensor:
        return self.mean(self.v) * (1.0 if self.eight_bit else 0.0)

    def key_counts(self) -> Tensor:
        """(B, H, nk): valid keys of each block."""
        ones = self.valid.double()[:, None].expand(-1, self.q.shape[1], -1)
        return self.by_block(ones.unsqueeze(-1)).squeeze(-1)

    def by_block(self, of_keys: Tensor) -> Tensor:
        """Sums of (B, H, Nk, X) over the keys of each block: (B, H, nk, X)."""
        batch, heads, _, wide = of_keys.shape
        sums = of_keys.new_zeros(batch, heads, self.key_blocks, wide)
        index = self.k_block[None, :, :, None].expand_as(of_keys)
        return sums.scatter_add_(2, index, of_keys)

    def largest_by_block(self, of_keys: Tensor) -> Tensor:
        """(B, H, Nk): the largest of the key's block, of (B, H, Nk) that are not negative."""
        batch, heads, _ = of_keys.shape
        index = self.k_block.expand(batch, -1, -1)
        largest = of_keys.new_zeros(batch, heads, self.key_blocks)
        return largest.scatter_reduce_(2, index, of_keys, "amax").gather(2, index)

    def pairs(self, blocks: Tensor) -> Tensor:
        """(B, H, Nq, Nk) bool: the pair exists and its block is one of `blocks` (B, H, nq, nk)."""
        b, h = (torch.arange(n, device=self.q.device) for n in self.q.shape[:2])
        rows, columns = self.q_block[None, :, :, None], self.k_block[None, :, None, :]
        seen = blocks[b[:, None, None, None], h[:, None, None], rows, columns]
        seen = seen & self.valid[:, None, None, :]
        # Causal: query i sees keys 0 .. i.
        return seen.tril() if self.case.is_causal else seen


@dataclass(frozen=True, eq=False)
class Exact:
    """The answer, and each row's weights over C columns: keys, then pooled keys."""

    out: Tensor  # (B, H, Nq, D)
    lse: Tensor  # (B, H, Nq)
    seen: Tensor  # (B, H, Nq) bool: the row sees a key
    p: Tensor  # (B, H, Nq, C)
    logits: Tensor  # (B, H, Nq, C), natural units
    keys: Tensor  # (B, H, C, D), around the key centre
    values: Tensor  # (B, H, C, D), around the value centre
    output_scale: Tensor  # (B, H, Nq)
    doubtful: Tensor | None  # (B, H, Nq, Nk) bool: rounding decides whether the filter skips it
    skipped: tuple[int, int]  # pairs that the filter skips at least and at most


def answer(setting: Setting, kept: Tensor, slack: Tensor | None = None) -> Exact:
    """kept (B, H, nq, nk) bool. slack (B, H, Nq, 1) or so: how far logits may be off, natural
    units, which matters to the PV filter alone."""
    case = setting.case
    pairs = setting.pairs(kept)
    logits = setting.q @ setting.k.mT * case.scale
    doubtful, skipped = None, (0, 0)
    if case.policy.pv_filter:
        sure, maybe = _filtered(setting, kept, logits.masked_fill(~pairs, -math.inf), slack)
        skipped = int((sure & pairs).sum()), int((maybe & pairs).sum())
        doubtful = maybe & ~sure & pairs
        pairs = pairs & ~sure
    logits = logits.masked_fill(~pairs, -math.inf)
    key_centre, value_centre = setting.key_centre, setting.value_centre
    keys, values = setting.k - key_centre, setting.v - value_centre
    output_scale = torch.ones_like(logits[..., 0])
    if case.head_settings is not None:
        if (pooled := _pooled(setting, kept)) is not None:
            columns, mean_keys, mean_values = pooled
            logits = torch.cat([logits, columns], -1)
            keys = torch.cat([keys, mean_keys - key_centre], 2)
            values = torch.cat([values, mean_values - value_centre], 2)
        if case.head_settings.output_scale is not None:
            dropped = _dropped(setting, kept)
            factor = case.head_settings.output_scale.double()[:, None].expand_as(dropped)
            output_scale = torch.where(dropped > 0, factor, 1.0)
    seen = (logits > -math.inf).any(-1)
    lse = logits.logsumexp(-1)
    p = (logits - lse.masked_fill(~seen, 0).unsqueeze(-1)).exp()
    out = output_scale.unsqueeze(-1) * (p @ values) + value_centre
    out = out.masked_fill(~seen.unsqueeze(-1), 0)
    return Exact(out, lse, seen, p, logits, keys, values, output_scale, doubtful, skipped)


def _pooled(setting: Setting, kept: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Logits (B, H, Nq, nk) of dropped blocks as one key each, and their keys and values: the means
    of the block, counted `pool_weight` times for each of its keys. Under causal a block that rows
    see in part is no such block."""
    head_settings, case = setting.case.head_settings, setting.case
    if head_settings is None or not (head_settings.pools and head_settings.pool_weight.any()):
        return None
    counts, pool_weight = setting.key_counts(), head_settings.pool_weight.double()
    stands = ~kept & (counts > 0).unsqueeze(2) & (pool_weight > 0)[:, None, None]
    if case.is_causal:
        first = torch.arange(kept.shape[2], device=kept.device).unsqueeze(-1) * QUERY_BLOCK
        last_key = (torch.arange(kept.shape[3], device=kept.device) + 1) * KEY_BLOCK - 1
        stands = stands & (last_key < first)
    share = 1 / counts.clamp(min=1).unsqueeze(-1)
    mean_keys, mean_values = (setting.by_block(x) * share for x in (setting.k, setting.v))
    weight = (counts * pool_weight[:, None]).log().unsqueeze(2)
    logits = setting.q @ mean_keys.mT * case.scale + weight
    return logits.masked_fill(~_of_rows(setting, stands), -math.inf), mean_keys, mean_values


def _of_rows(setting: Setting, by_query_block: Tensor) -> Tensor:
    """(B, H, nq, ...) to (B, H, Nq, ...)."""
    b, h = (torch.arange(n, device=by_query_block.device) for n in by_query_block.shape[:2])
    return by_query_block[b[:, None, None], h[:, None], setting.q_block[None]]


def _dropped(setting: Setting, kept: Tensor) -> Tensor:
    """(B, H, Nq): blocks with keys that the row's query block drops."""
    blocks = ((setting.key_counts() > 0).unsqueeze(2) & ~kept).sum(-1)
    return _of_rows(setting, blocks)


def _filtered(
    setting: Setting, kept: Tensor, logits: Tensor, slack: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(B, H, Nq, Nk) bool: pairs that the PV filter leaves out for sure, and those it may.

    A block is left out for 64 rows when for each of them its largest logit is more than the
    threshold (log2 units) below the largest of the kept blocks before it. The first kept block is
    never left out, and rows without a key there do not count against it.
    """
    policy, (batch, heads, queries, _) = setting.case.policy, logits.shape
    blocks = setting.key_blocks
    index = setting.k_block[None, :, None].expand(batch, -1, queries, -1)
    most = torch.full((batch, heads, queries, blocks), -math.inf, device=logits.device).double()
    most = most.scatter_reduce_(3, index, logits, "amax")
    before = most.cummax(-1).values.roll(1, -1)
    before[..., 0] = -math.inf
    threshold = torch.as_tensor(policy.pvthreshd, device=logits.device).double().expand(heads)
    below = (before - most) / LN2 - threshold.float().double()[:, None, None]
    below = torch.where(most == -math.inf, math.inf, below)  # it has no key for the row
    margin = 1e-5 if slack is None else (2 * slack / LN2).unsqueeze(-1) + 1e-5
    is_first = kept.int().cumsum(-1) <= 1
    not_first = _of_rows(setting, kept & ~is_first)

    def by_group(row_agrees: Tensor) -> Tensor:
        group = setting.q_slot // FILTER_ROWS
        size = int(group.max()) + 1
        where = group[None, :, :, None].expand(batch, -1, -1, blocks)
        disagree = torch.zeros(batch, heads, size, blocks, device=logits.device).double()
        disagree.scatter_add_(2, where, (~row_agrees).double())
        skip = (disagree.gather(2, where) == 0) & not_first
        return skip.gather(3, index)

    return by_group(below > margin), by_group(below > -margin)


def _read(x: Tensor) -> Tensor:
    return (x.bfloat16() if x.dtype == torch.float32 else x).double()

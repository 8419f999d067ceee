# SPDX-License-Identifier: Apache-2.0
"""Exact and pooled parts of some query blocks, and their distance from exact attention.

Parts are taken bucket by bucket; the distances are what measuring scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import QUERY_BLOCK
from ..head_settings import HeadSettings
from ..reference.budgeted import bucket_partials
from ..reference.choose import choose_blocks
from ..reference.packed import Packed, pack_qkv
from ..reference.partial import Partial
from .candidates import CandidateSet
from .scoring import Distances, bucket_distances
from .spread import rows_on
from .workload import Workload


@dataclass(frozen=True, eq=False)
class Measured:
    """Result of measuring S query blocks under every candidate."""

    distances: Distances
    """Distances of rows (orders, B, H, S, rows a block)."""
    occupied: Tensor
    """(S, rows a block) bool: the row is a query, in every token order. Other rows hold nothing of
    meaning."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One measurement: q (B, H, N, D) over k, v (B, Hkv, N, D), on some query blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    query_blocks: Sequence[int]
    workload: Workload
    candidates: CandidateSet
    scale: float
    key_lengths: Tensor | None
    order_kinds: range = range(1)
    """Token orders of the workload to measure; the first is one of them."""
    row_step: int = 1
    """One in so many rows of a query block is compared, as in `spread_rows`."""

    def of_heads(self, heads: slice) -> Sample:
        """Same measurement of some KV heads and the query heads that read them."""
        group = self.q.shape[1] // self.k.shape[1]
        query = slice(heads.start * group, heads.stop * group)
        return replace(self, q=self.q[:, query], k=self.k[:, heads], v=self.v[:, heads])


def stacked(of_orders: Iterable[Distances]) -> Distances:
    """Stacks what was found of rows (B, H, S, rows) in each token order.

    Orders may be measured while this takes them, so that nothing else of one is alive in the next.
    """
    return Distances.of_packed(torch.stack(list(map(Distances.packed, of_orders)), -5))


#: Measures how far the parts of attention lie from the whole; must not synchronise with the GPU.
Measure = Callable[[Sample], Measured]


def reference_measure(sample: Sample) -> Measured:
    """Computes a `Measure` in the reference's arithmetic, for tests and for machines without
    kernels."""
    device = sample.q.device
    of_orders = [
        _in_its_order(replace(sample, workload=sample.workload.of_kind(order_kind, device)))
        for order_kind in sample.order_kinds
    ]
    found, occupied = zip(*of_orders, strict=True)
    return Measured(stacked(found), occupied[0])


def _in_its_order(sample: Sample) -> tuple[Distances, Tensor]:
    """Distances of rows (B, H, S, rows), and which rows are queries."""
    order = None if sample.workload.is_causal else sample.workload.order
    packed = pack_qkv(sample.q, sample.k, sample.v, order, key_lengths=sample.key_lengths)
    occupied = _by_block(packed.occupied.unsqueeze(-1), sample)[..., 0]
    parts = _bucket_partials(sample, packed, _sampled_buckets(sample, packed))
    return bucket_distances(parts, _mean_value(packed)), occupied


def _sampled_buckets(sample: Sample, packed: Packed) -> Tensor:
    """Buckets (B, H, nq, nk), -1 in query blocks that are not measured."""
    workload, candidates = sample.workload, sample.candidates
    choice = choose_blocks(
        packed,
        workload.policy(),
        HeadSettings.uniform(sample.q.shape[1], 1.0, router=candidates.router),
        scale=sample.scale,
        is_causal=workload.is_causal,
    )
    every = candidates.buckets(choice.rank, choice.valid)
    sampled = torch.full_like(every, -1)
    for block in sample.query_blocks:
        sampled[:, :, block] = every[:, :, block]
    return sampled


def _mean_value(packed: Packed) -> Tensor:
    """(B, H, 1, 1, D): mean value of all keys."""
    operands = packed.operands
    mean = operands.vbar.repeat_interleave(operands.heads // operands.kv_heads, 1)
    return mean[:, :, None, None]


def _bucket_partials(
    sample: Sample, packed: Packed, buckets: Tensor
) -> list[tuple[Partial, Partial]]:
    """Exact and pooled part (B, H, S, 128, D) of each bucket."""
    parts = bucket_partials(
        packed,
        buckets,
        len(sample.candidates.densities),
        scale=sample.scale,
        is_causal=sample.workload.is_causal,
    )
    return [(_rows(exact, sample), _rows(pooled, sample)) for exact, pooled in parts]


def _rows(part: Partial, sample: Sample) -> Partial:
    return Partial(
        _by_block(part.unnormalised, sample),
        _by_block(part.row_max.unsqueeze(-1), sample)[..., 0],
        _by_block(part.row_sum.unsqueeze(-1), sample)[..., 0],
    )


def _by_block(rows: Tensor, sample: Sample) -> Tensor:
    """Reshapes (..., N, D) to (..., S, rows a block, D)."""
    firsts = [block * QUERY_BLOCK for block in sample.query_blocks]
    blocks = [rows[..., first : first + QUERY_BLOCK, :] for first in firsts]
    whole = torch.stack([pad(x, (0, 0, 0, QUERY_BLOCK - x.shape[-2])) for x in blocks], -3)
    return whole.index_select(-2, rows_on(whole.device, sample.row_step))

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
from ..common.partial import Partial
from ..head_settings import HeadSettings
from ..policy import SparsePolicy
from ..reference import Attended, Quantized, attend, quantize_qkv, route
from ..reference.quantized import by_query_head
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
class MeasuredCall:
    """One measurement: q (B, H, N, D) over k, v (B, Hkv, N, D), on some query blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    query_blocks: Sequence[int]
    workload: Workload
    candidates: CandidateSet
    scale: float
    order_kinds: range
    """Token orders of the workload to measure; the first is one of them."""
    row_step: int
    """One in so many rows of a query block is compared, as in `spread_rows`."""

    def of_heads(self, heads: slice) -> MeasuredCall:
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
Measure = Callable[[MeasuredCall], Measured]


def reference_measure(call: MeasuredCall) -> Measured:
    """Computes a `Measure` in the reference's arithmetic, for tests and for machines without
    kernels."""
    device = call.q.device
    of_orders = [
        _in_its_order(replace(call, workload=call.workload.of_kind(order_kind, device)))
        for order_kind in call.order_kinds
    ]
    found, occupied = zip(*of_orders, strict=True)
    return Measured(stacked(found), occupied[0])


def _in_its_order(call: MeasuredCall) -> tuple[Distances, Tensor]:
    """Distances of rows (B, H, S, rows), and which rows are queries."""
    x = quantize_qkv(call.q, call.k, call.v, call.workload.order)
    occupied = _by_block(x.occupied.unsqueeze(-1), call)[..., 0]
    parts = _bucket_partials(call, x, _measured_buckets(call, x))
    return bucket_distances(parts, _mean_value(x)), occupied


def _measured_buckets(call: MeasuredCall, x: Quantized) -> Tensor:
    """Buckets (B, H, nq, nk), -1 in query blocks that are not measured."""
    by_router = HeadSettings.uniform(call.q.shape[1], 1.0, router=call.candidates.router)
    routed = route(x, SparsePolicy(), by_router, scale=call.scale)
    every = call.candidates.buckets(routed.rank, routed.valid)
    measured = torch.full_like(every, -1)
    for block in call.query_blocks:
        measured[:, :, block] = every[:, :, block]
    return measured


def _mean_value(x: Quantized) -> Tensor:
    """(B, H, 1, 1, D): mean value of all keys."""
    return by_query_head(x.vbar, x.heads)[:, :, None, None]


def _bucket_partials(
    call: MeasuredCall, x: Quantized, buckets: Tensor
) -> list[tuple[Partial, Partial]]:
    """Exact and pooled part (B, H, S, rows a block, D) of each bucket of blocks.

    With the first t buckets exact and pool weight g, the output is that of all exact parts before t
    together with all pooled parts from t on, their keys counted g times.
    """
    nothing = torch.zeros_like(buckets, dtype=torch.bool)
    parts: list[tuple[Partial, Partial]] = []
    for bucket in range(len(call.candidates.densities)):
        blocks = buckets == bucket
        exact = attend(x, blocks, scale=call.scale)
        pooled = attend(x, nothing, blocks, scale=call.scale)
        parts.append((_rows(exact, call), _rows(pooled, call)))
    return parts


def _rows(attended: Attended, call: MeasuredCall) -> Partial:
    return Partial(
        _by_block(attended.unnormalised, call),
        _by_block(attended.row_max.unsqueeze(-1), call)[..., 0],
        _by_block(attended.row_sum.unsqueeze(-1), call)[..., 0],
    )


def _by_block(rows: Tensor, call: MeasuredCall) -> Tensor:
    """Reshapes (..., N, D) to (..., S, rows a block, D)."""
    firsts = [block * QUERY_BLOCK for block in call.query_blocks]
    blocks = [rows[..., first : first + QUERY_BLOCK, :] for first in firsts]
    whole = torch.stack([pad(x, (0, 0, 0, QUERY_BLOCK - x.shape[-2])) for x in blocks], -3)
    return whole.index_select(-2, rows_on(whole.device, call.row_step))

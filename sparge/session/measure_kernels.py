# SPDX-License-Identifier: Apache-2.0
"""Measuring on a GPU by the library's own kernels, in groups of heads that bound the memory.

For each group keys and values are quantized. The measured query blocks are routed for every
measured density in one launch, attended to in one, bucket by bucket of key blocks, and scored in
one, which also pools what is dropped. A bucket is what a density keeps beside the one before. With
the first t buckets exact and the others pooled with weight g, attention gives a mix of the outputs
of both parts, e and p, with the weight w = a / (a + g r) of their sums a and r, so that

    |y - o|^2 = w^2 |e - o|^2 + 2 w (1 - w) <e - o, p - o> + (1 - w)^2 |p - o|^2

and products of e - o, p - o and m - o, which the score kernel gives, serve all pool weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import QUERY_BLOCK, block_count, pack
from ..head_settings import Router
from ..kernels import Element
from ..order.grid import EMPTY, TokenOrder
from ..policy import PV_FILTER_OFF
from ..stages.measuring import Measuring
from ..stages.workspace import CallShape, WorkspaceLayout
from ..thresholds import SELECTION, threshold_table
from .measure import POOL_WEIGHTS, ROW_STEP, Measured, MeasuredCall, compared_rows, tokens_of_blocks

#: Bytes that a measurement may take however short the sequence is, and share of the workspace of a
#: sparse call that it may take of a long one (docs/experiments.md, Memory of a measurement).
_LEAST_BYTES, _OF_A_CALL = 83_000_000, 1.25


def on_kernels(call: MeasuredCall, with_truth: bool) -> Measured:
    """`measure.measure` on the kernels, in the arithmetic that the sparse calls will use. Pooled
    parts have float32 mean keys and bf16 mean values: rounding their few keys is no part of what
    candidates differ in."""
    facts = _Facts.of(call)
    batch, heads, _, channels = call.q.shape
    orders, fields = call.candidates.orders, sum(_widths(call))
    found = torch.empty(
        fields, orders, batch, heads, facts.rows, dtype=torch.float32, device=call.q.device
    )
    truth = call.q.new_empty(batch, heads, facts.rows, channels) if with_truth else None
    for kind in range(orders):
        rows = facts.rows_of(kind)
        for kv_heads in _head_groups(call, facts):
            _Group(call, facts, rows, call.order.of_kind(kind), kv_heads).score(
                found[:, kind], truth if kind == 0 else None
            )
    error, towards, norm, far = _sums(found, facts, call)
    if truth is not None:
        truth = truth.unflatten(2, (len(call.query_blocks), -1))
    return Measured(error, towards, far, norm, truth)


def _widths(call: MeasuredCall) -> list[int]:
    """Numbers of values that the score kernel gives of a row: |e - o|^2 of each density; of all but
    the last, which drops nothing, <e - o, p - o>, |p - o|^2, ln(a / r), <e - o, m - o>, <p - o, m -
    o>; |o|^2 and |m - o|^2."""
    densities = len(call.candidates.measured)
    return [densities, *[densities - 1] * 5, 2]


def _sums(found: Tensor, facts: _Facts, call: MeasuredCall) -> tuple[Tensor, ...]:
    """error and towards (H, orders, pool weights, densities), norm and far (H, orders), float64, of
    what the score kernel found (fields, orders, B, H, rows)."""
    near, between, far, advantage, kept, pooled, of_rows = found.split(_widths(call))
    logs = torch.tensor([math.log(weight) for weight in POOL_WEIGHTS[1:]], device="cpu")
    logs = logs.to(found.device, non_blocking=True).view(-1, *[1] * near.ndim)
    # Share of the pooled part in a mix; 0 where there is neither part, which gives NaN.
    rest = (logs - advantage).sigmoid_().nan_to_num_(0.0)
    mixed = torch.lerp(torch.lerp(near[:-1], between, rest), torch.lerp(between, far, rest), rest)
    # A pooled part as good as the exact one may leave a sum just below 0.
    error = torch.cat([near[None, :-1], mixed.clamp_(min=0)])
    towards = torch.cat([kept[None], torch.lerp(kept.expand_as(rest), pooled, rest)])
    error = torch.cat([error, near[-1:].expand(len(error), -1, *near.shape[1:])], 1)
    towards = torch.cat([towards, torch.zeros_like(towards[:, :1])], 1)
    # (pool weights, densities, orders, B, H, rows) and (2, orders, B, H, rows)
    of_heads = (
        x.masked_fill(facts.empty_rows, 0).sum((-3, -1), dtype=torch.float64)
        for x in (error, towards, of_rows)
    )
    error, towards, squares = of_heads
    return (*(x.permute(3, 2, 0, 1) for x in (error, towards)), *squares.transpose(1, 2))


@dataclass(frozen=True, eq=False)
class _Facts:
    """Facts of the measured query blocks, shared by all token orders and groups of heads."""

    call: MeasuredCall
    element: Element
    tokens: Tensor
    """(orders, S x 128, 1) int64: the token of each slot, some token where it is empty."""
    empty: Tensor
    """(S x 128, 1) bool: the slot holds none, in any token order."""
    means: Tensor
    """(4, B, Hkv, head_dim) float32: those of `Measuring.means`."""
    similar: Tensor
    """(B x H x candidates x S,) float32: self-similarity of each routed query block, which has no
    say."""
    thresholds: Tensor
    """(H, densities - 1, fields) float32: `HeadThresholds` that route as each other density."""
    every_block: Tensor
    """(words,) int32: all key blocks, packed."""
    compared: Tensor
    """(1, S x 128) int32: number of each slot among the compared rows, `EMPTY` between them."""

    @classmethod
    def of(cls, call: MeasuredCall) -> _Facts:
        """Facts on the device of the call; never waits for it."""
        device, (batch, heads, *_) = call.q.device, call.q.shape
        measuring = Measuring(call.k, call.v, call.order, call.scale)
        tokens = tokens_of_blocks(call.order, call.query_blocks)
        routed = batch * heads * (len(call.candidates.measured) - 1) * len(call.query_blocks)
        return cls(
            call,
            measuring.element,
            tokens.flatten(1).clamp(min=0).long().unsqueeze(-1),
            (tokens[0] == EMPTY).view(-1, 1),
            measuring.means(),
            torch.zeros(routed, dtype=torch.float32, device=device),
            _thresholds(call.candidates.measured).repeat(heads, 1, 1).to(device, non_blocking=True),
            pack(torch.ones_like(call.order.block_counts, dtype=torch.bool)),
            _places(tokens),
        )

    @property
    def rows(self) -> int:
        """Number of compared rows."""
        return len(self.call.query_blocks) * QUERY_BLOCK // ROW_STEP

    @property
    def empty_rows(self) -> Tensor:
        """(rows,) bool: compared rows that hold no query."""
        return compared_rows(self.empty.view(-1, QUERY_BLOCK)).flatten()

    def rows_of(self, kind: int) -> tuple[Tensor, Tensor]:
        """Queries that are compared (B, H, rows, D), and mean query of each block, once for each
        routed density: (B, H, candidates, S, channels) float32, padded as the kernels' are."""
        batch, heads, _, own = self.call.q.shape
        q = self.call.q.gather(2, self.tokens[kind].expand(batch, heads, -1, own))
        by_block = q.masked_fill_(self.empty, 0).unflatten(2, (-1, QUERY_BLOCK))
        queries = (~self.empty).view(-1, QUERY_BLOCK).sum(1, keepdim=True)
        means = by_block.sum(3, dtype=torch.float32).div_(queries)
        means = pad(means, (0, self.means.shape[-1] - own))
        routed = len(self.call.candidates.measured) - 1
        for_each = means.unsqueeze(2).expand(-1, -1, routed, -1, -1).contiguous()
        return compared_rows(by_block, 3).flatten(2, 3), for_each

    def routed_shape(self, kv_heads: int) -> CallShape:
        """Shape of a call whose queries are the measured blocks and whose heads are the routed
        densities of each head."""
        call = self.call
        batch, heads, _, channels = call.q.shape
        routed = heads // call.k.shape[1] * kv_heads * (len(call.candidates.measured) - 1)
        queries = len(call.query_blocks) * QUERY_BLOCK
        return CallShape(batch, routed, kv_heads, queries, call.order.slots, channels)

    def layout(self, kv_heads: int) -> WorkspaceLayout:
        return WorkspaceLayout(self.routed_shape(kv_heads), self.element, False, True)


def _thresholds(measured: tuple[float, ...]) -> Tensor:
    """(densities - 1, fields) on the CPU: one copy is cheaper than a launch for each number."""
    table = threshold_table(
        len(measured) - 1,
        torch.device("cpu"),
        selection=1.0,
        simthreshd1=-torch.inf,
        pvthreshd=PV_FILTER_OFF,
        router=float(Router.ERROR),
    )
    table[:, SELECTION] = torch.tensor(measured[:-1], dtype=table.dtype, device="cpu")
    return table


def _places(tokens: Tensor) -> Tensor:
    """`_Facts.compared` of tokens (orders, S, 128)."""
    found = torch.full_like(tokens[0], EMPTY)
    rows = compared_rows(torch.arange(QUERY_BLOCK, device=tokens.device))
    places = torch.arange(found.shape[0] * len(rows), dtype=found.dtype, device=found.device)
    return found.index_copy_(1, rows, places.view(-1, len(rows))).view(1, -1)


def _head_groups(call: MeasuredCall, facts: _Facts) -> Iterator[slice]:
    """KV heads in groups of about one size, as few as fit."""
    kv_heads = call.k.shape[1]
    of_all, of_one = _bytes_of_all_heads(call, facts), _bytes_a_kv_head(call, facts)
    shape = CallShape.of(call.q, call.k, call.order.slots)
    workspace = WorkspaceLayout(shape, facts.element, True, True).nbytes
    room = max(_LEAST_BYTES, int(_OF_A_CALL * workspace)) - of_all
    groups = block_count(kv_heads, max(1, room // of_one))
    for first, end in pairwise(kv_heads * group // groups for group in range(groups + 1)):
        yield slice(first, end)


def _bytes_of_all_heads(call: MeasuredCall, facts: _Facts) -> int:
    """Bytes of the rows of one token order, and of what is found of all orders."""
    batch, heads, _, channels = call.q.shape
    compared = batch * heads * facts.rows
    routed = facts.routed_shape(call.k.shape[1])
    means = 4 * batch * routed.heads * routed.query_blocks * (routed.head_dim + 1)
    queries = (1 + ROW_STEP) * compared * channels * call.q.element_size()
    return queries + means + 4 * compared * call.candidates.orders * sum(_widths(call))


def _bytes_a_kv_head(call: MeasuredCall, facts: _Facts) -> int:
    """Bytes of the workspace and of attend for each KV head."""
    batch, heads, _, channels = call.q.shape
    rows = batch * heads // call.k.shape[1] * facts.rows
    buckets = len(call.candidates.measured)
    is_one_view = batch == 1 and heads == call.k.shape[1]  # of the queries of all buckets
    copies = 1 if is_one_view else 1 + buckets
    attended = rows * (buckets * (4 * channels + 8) + copies * channels * call.q.element_size())
    return attended + facts.layout(1).nbytes


class _Group:
    """Some heads of a measurement, in one token order."""

    def __init__(
        self,
        call: MeasuredCall,
        facts: _Facts,
        rows: tuple[Tensor, Tensor],
        order: TokenOrder,
        kv_heads: slice,
    ) -> None:
        group = call.q.shape[1] // call.k.shape[1]
        self.heads = slice(kv_heads.start * group, kv_heads.stop * group)
        self.kv_heads, self.facts, self.q = kv_heads, facts, call.q[:, self.heads]
        self.rows, self.means = (x[:, self.heads] for x in rows)
        self.shape = facts.routed_shape(kv_heads.stop - kv_heads.start)
        k, v = call.k[:, kv_heads], call.v[:, kv_heads]
        self.measuring = Measuring(k, v, order, call.scale)

    def score(self, found: Tensor, truth: Tensor | None) -> None:
        """Fills in the heads of `found` (fields, B, H, rows) and `truth` (B, H, rows, D)."""
        workspace = self.measuring.quantized(self.q, self.facts.means[:, :, self.kv_heads])
        kept = self._kept(workspace)
        sums, row_max, row_sum = exact = self._exact(workspace, self._buckets(kept))
        self.measuring.score(exact, self.rows, workspace, self.shape, kept, found[:, :, self.heads])
        if truth is not None:
            share = (row_max - row_max.amax(2, keepdim=True)).nan_to_num_(-torch.inf).exp2_()
            total = (row_sum * share).sum(2).unsqueeze(-1)
            truth[:, self.heads] = ((sums * share.unsqueeze(-1)).sum(2) / total).to(truth.dtype)

    def _kept(self, workspace: Tensor) -> Tensor:
        """(B, H, densities - 1, S, words) int32: the block map of each routed density."""
        kept = self.measuring.routed(
            workspace,
            self.shape,
            self.facts.thresholds[self.heads].flatten(0, 1),
            self.means.flatten(1, 2).contiguous(),
            self.facts.similar,
        )
        return kept.unflatten(1, (-1, len(self.facts.call.candidates.measured) - 1))

    def _buckets(self, kept: Tensor) -> Tensor:
        """(B, H, densities, S, words) int32: what each density keeps beside the one before, from
        the maps of all but the last, which keeps every block."""
        every = self.facts.every_block.expand_as(kept[:, :, :1])
        buckets = torch.cat([kept, every], 2)
        buckets[:, :, 1:].bitwise_xor_(kept)
        return buckets

    def _exact(self, workspace: Tensor, buckets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attention from each measured block to each bucket of its key blocks, as heads of their
        own: sums of exp2(s - max) v (B, H, buckets, rows, D), max and sums of exp2(s - max). Each
        KV head is a batch entry, so that one copy of the queries serves all buckets."""
        batch, heads, count, blocks, words = buckets.shape
        kv_heads = self.shape.kv_heads
        by_kv = (batch * kv_heads, heads // kv_heads * count)
        q = self.rows.unsqueeze(2).expand(-1, -1, count, -1, -1)
        q = q.reshape(*by_kv, *q.shape[-2:])
        sums, row_max, row_sum = self.measuring.attended(
            workspace,
            q,
            buckets.view(*by_kv, blocks, words),
            self.facts.compared,
            self.shape.keys,
        )
        by_bucket = (batch, heads, count)
        sums = sums.view(*by_bucket, *q.shape[-2:])
        return sums, row_max.view(*by_bucket, -1), row_sum.view(*by_bucket, -1)

# SPDX-License-Identifier: Apache-2.0
"""Calibration's measurement on the GPU: one attend launch a router over the sampled rows.

On a GPU it is the number of operations that counts, which each have little to do: buckets are a
dimension here, not a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from ..call import element_of
from ..kernels import capabilities
from ..plan.blocks import QUERY_BLOCK, pack
from ..plan.budget import Router
from ..plan.grid import EMPTY, TokenOrder
from ..policy import PV_FILTER_OFF, Precision
from ..reference.partial import NO_LOGIT, Partial
from ..reference.route import rank_blocks
from ..reference.scores import BlockFacts, log_error, log_mass
from ..workspace import CallShape, WorkspaceLayout
from .measure import Measure, Measured, Sample, reference_measure
from .scoring import Parts

_LOG2_E = 1.4426950408889634


def kernel_measure(sample: Sample) -> Measured:
    """A `Measure` on the library's own kernels; causal samples take the reference.

    Exact parts are attended to in the arithmetic that the sparse calls will use. Pooled parts have
    fp16 operands: rounding their few keys is no part of what candidates differ in.
    """
    if sample.workload.is_causal:
        return reference_measure(sample)
    rows = _Rows.of(sample)
    by_router = []
    for router in sample.candidates.routers:
        inside = rows.inside(sample, router)
        by_router.append(_paired(_exact_parts(sample, rows, inside), _pooled_parts(rows, inside)))
    occupied = rows.tokens != EMPTY
    return Measured(by_router, occupied.view(len(sample.query_blocks), QUERY_BLOCK))


def measure_for(device: torch.device | str) -> Measure:
    """The `Measure` that runs on `device`: the kernels where they can, else the reference."""
    return kernel_measure if capabilities(device).usable else reference_measure


@dataclass(frozen=True, eq=False)
class _Pseudo:
    """What all routers share of the pooled parts."""

    p: Tensor  # (B, H, S, 128, nk) fp16, of the row's maximum
    row_max: Tensor  # (B, H, S, 128) log2 units
    values: Tensor  # (B, H, nk, D) fp16, in units of `size`
    size: Tensor  # (B, H, 1, 1) float32


@dataclass(frozen=True, eq=False)
class _Rows:
    """The sampled rows and what the quantize kernel says about all keys."""

    order: TokenOrder
    tokens: Tensor  # (S * 128,) int32, -1 in empty slots
    q: Tensor  # (B, H, S * 128, D)
    workspace: Tensor
    shape: CallShape
    element: int
    facts: BlockFacts  # query means of the sampled blocks only
    pseudo: _Pseudo

    @classmethod
    def of(cls, sample: Sample) -> _Rows:
        order = sample.workload.order.on(sample.q.device)
        element = element_of(Precision.INT8, sample.q)
        shape = CallShape.of(sample.q, sample.k, order.slots)
        workspace = ops.quantize(
            sample.q,
            sample.k,
            sample.v,
            sample.key_lengths,
            True,
            int(element),
            True,
            True,
            order.slot_token,
            order.block_counts,
        )
        layout = WorkspaceLayout(
            shape, element, with_values=True, with_queries=True, with_pools=True
        )

        def field(name: str) -> Tensor:
            return layout.view(workspace, name)

        def by_block(name: str) -> Tensor:
            return field(name).transpose(-1, -2)[..., : shape.channels]

        slots = pad(order.slot_token, (0, -order.slots % QUERY_BLOCK), value=EMPTY)
        tokens = _at(slots.view(-1, QUERY_BLOCK), 0, sample.query_blocks).flatten()
        q = sample.q.index_select(2, tokens.clamp(min=0))
        facts = BlockFacts(
            _at(field("q_block_mean"), 2, sample.query_blocks)[..., : shape.channels],
            by_block("k_block_mean"),
            field("key_counts")[:, 0],
            by_block("k_variance"),
            by_block("v_block_mean"),
            field("v_variance"),
        )
        v_mean = field("v_mean")[..., : shape.channels]
        pseudo = _pseudo(q, facts, v_mean, sample.scale)
        return cls(order, tokens, q, workspace, shape, int(element), facts, pseudo)

    def inside(self, sample: Sample, router: Router) -> Tensor:
        """(B, H, T, S, nk) bool: the block is in the bucket; see `CandidateSet.buckets`."""
        heads, blocks = self.shape.heads, len(sample.query_blocks)
        valid = (self.facts.key_counts > 0)[:, None, None].expand(-1, heads, blocks, -1)
        ranked = valid & ~self.order.keys_exact
        if sample.workload.sink:
            ranked = ranked & (torch.arange(ranked.shape[-1], device=ranked.device) > 0)
        if router is Router.ERROR:
            scores = log_error(self.facts, sample.scale, valid)
        else:
            scores = log_mass(self.facts, sample.scale)
        rank = rank_blocks(scores.masked_fill(~ranked, -torch.inf)).masked_fill(~ranked, -1)
        bounds = [-1, *sample.candidates.kept_ranks(rank.shape[-1])[:-1], rank.shape[-1]]
        parts = [(rank >= low) & (rank < high) & valid for low, high in pairwise(bounds)]
        return torch.stack(parts, 2)


def _at(tensor: Tensor, dim: int, places: Sequence[int]) -> Tensor:
    """`tensor` at some places of a dimension; an index tensor would come from the host and wait."""
    return torch.stack([tensor.select(dim, place) for place in places], dim)


def _pseudo(q: Tensor, facts: BlockFacts, v_mean: Tensor, scale: float) -> _Pseudo:
    keys = facts.of_query_heads(facts.k_block_mean)
    values = facts.of_query_heads(facts.v_block_mean + v_mean.unsqueeze(2))
    logits = q.float() @ keys.transpose(-1, -2) * (scale * _LOG2_E)
    logits = logits + facts.key_counts.float().log2()[:, None, None]
    row_max = logits.amax(-1, keepdim=True)
    p = torch.exp2(logits - row_max.masked_fill(row_max == NO_LOGIT, 0)).half()
    size = values.abs().amax((-1, -2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return _Pseudo(
        p.unflatten(2, (-1, QUERY_BLOCK)),
        row_max.squeeze(-1).unflatten(2, (-1, QUERY_BLOCK)),
        (values / size).half(),
        size,
    )


def _exact_parts(sample: Sample, rows: _Rows, inside: Tensor) -> Partial:
    """(B, H, T, S, 128, ...): each sampled block attends to each bucket of key blocks, as a query
    block of its own."""
    count = inside.shape[2]
    q = rows.q.repeat(1, 1, count, 1)
    shape = [*rows.shape.sizes()[:3], q.shape[2], *rows.shape.sizes()[4:]]
    sums = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    row_max = sums.new_empty(sums.shape[:3])
    row_sum = torch.empty_like(row_max)
    ops.attend(
        q,
        rows.workspace,
        pack(inside.flatten(2, 3)),
        shape,
        rows.element,
        True,
        sample.key_lengths,
        None,
        sample.scale,
        PV_FILTER_OFF,
        False,
        False,
        q,  # what is not asked for goes where every row was read before it is written
        None,
        sums,
        row_max,
        row_sum,
        None,
    )
    return Partial(*(x.unflatten(2, (count, -1, QUERY_BLOCK)) for x in (sums, row_max, row_sum)))


def _pooled_parts(rows: _Rows, inside: Tensor) -> Partial:
    """(B, H, T, S, 128, ...): pseudo-keys around one maximum a row; what underflows counts for
    nothing."""
    pseudo = rows.pseudo
    p = pseudo.p.unsqueeze(2) * inside.unsqueeze(4)
    sums = (p.flatten(2, 4) @ pseudo.values).float() * pseudo.size
    row_sum = p.sum(-1, dtype=torch.float32)
    row_max = pseudo.row_max.unsqueeze(2).expand_as(row_sum)
    return Partial(sums.unflatten(2, p.shape[2:5]), row_max, row_sum)


def _paired(exact: Partial, pooled: Partial) -> Parts:
    """A pair of Partials (B, H, S, 128, ...) a bucket."""

    def by_bucket(part: Partial) -> list[Partial]:
        fields = (part.unnormalised, part.row_max, part.row_sum)
        return [Partial(*bucket) for bucket in zip(*(x.unbind(2) for x in fields), strict=True)]

    return list(zip(by_bucket(exact), by_bucket(pooled), strict=True))

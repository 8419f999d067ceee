# SPDX-License-Identifier: Apache-2.0
"""Calibration's measurement on the GPU: one attend launch over the sampled rows.

Routers and buckets are dimensions here, not loops; see `scoring`. Query blocks go in slices that
bound the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

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
from ..reference.attend import LOG2_E
from ..reference.partial import Partial, finite
from ..reference.route import rank_blocks
from ..reference.scores import BlockFacts, log_scores
from ..workspace import CallShape, WorkspaceLayout
from .measure import Measure, Measured, Sample, reference_measure
from .scoring import Distances, distances

#: Bytes of a slice's exact sums, half of the peak: two query blocks of Mochi's 24 heads are 44 MB.
_SUMS_BYTES = 48 << 20


def kernel_measure(sample: Sample) -> Measured:
    """A `Measure` on the library's own kernels; causal samples take the reference.

    Exact parts are attended to in the arithmetic that the sparse calls will use. Pooled parts have
    fp16 operands: rounding their few keys is no part of what candidates differ in.
    """
    if sample.workload.is_causal:
        return reference_measure(sample)
    keys = _Keys.of(sample)
    slices = list(_slices(sample))
    tokens = [_tokens(keys.order, blocks) for blocks in slices]
    found = [_distances(sample, keys, *each) for each in zip(slices, tokens, strict=True)]
    return Measured(_joined(found), torch.cat(tokens) != EMPTY)


def measure_for(device: torch.device | str) -> Measure:
    """The `Measure` that runs on `device`: the kernels where they can, else the reference."""
    return kernel_measure if capabilities(device).usable else reference_measure


def _slices(sample: Sample) -> Iterator[Sequence[int]]:
    batch, heads, _, channels = sample.q.shape
    routers, densities, _ = sample.candidates.shape
    of_a_block = batch * heads * routers * densities * QUERY_BLOCK * channels * 4
    count = max(1, _SUMS_BYTES // of_a_block)
    for first in range(0, len(sample.query_blocks), count):
        yield sample.query_blocks[first : first + count]


def _tokens(order: TokenOrder, blocks: Sequence[int]) -> Tensor:
    """(S, 128) int32, -1 in empty slots."""
    slots = pad(order.slot_token, (0, -order.slots % QUERY_BLOCK), value=EMPTY)
    return _at(slots.view(-1, QUERY_BLOCK), 0, blocks)


def _at(tensor: Tensor, dim: int, places: Sequence[int]) -> Tensor:
    """`tensor` at some places of a dimension; an index tensor would come from the host and wait."""
    return torch.stack([tensor.select(dim, place) for place in places], dim)


def _joined(slices: Sequence[Distances]) -> Distances:
    if len(slices) == 1:
        return slices[0]
    names = [field.name for field in fields(Distances)]
    return Distances(*(torch.cat([getattr(each, name) for each in slices], -2) for name in names))


@dataclass(frozen=True, eq=False)
class _Keys:
    """What the quantize kernel says about all keys and blocks."""

    order: TokenOrder
    workspace: Tensor
    shape: CallShape
    element: int
    facts: BlockFacts  # of all query blocks
    valid: Tensor  # (B, nk) bool
    ranked: Tensor  # (B, nk) bool: valid, and may be dropped
    log_counts: Tensor  # (B, nk) log2 of the keys, -inf for a block that is never dropped
    values: Tensor  # (B, Hkv, nk, D) fp16: mean values, in units of `unit`
    unit: Tensor  # (B, Hkv, 1, 1) float32

    @classmethod
    def of(cls, sample: Sample) -> _Keys:
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
            order.slot_tokens,
            order.block_counts,
        )
        layout = WorkspaceLayout(
            shape, element, with_values=True, with_queries=True, with_pools=True
        )

        def field(name: str) -> Tensor:
            return layout.view(workspace, name)

        def by_block(name: str) -> Tensor:
            return field(name).transpose(-1, -2)[..., : shape.channels]

        facts = BlockFacts(
            field("q_block_mean")[..., : shape.channels],
            by_block("k_block_mean"),
            field("key_counts")[:, 0],
            by_block("k_variance"),
            by_block("v_block_mean"),
            field("v_variance"),
        )
        valid = facts.key_counts > 0
        ranked = valid & ~order.keys_exact
        if sample.workload.sink:
            ranked[:, 0] = False
        log_counts = facts.key_counts.log2().masked_fill_(~ranked, -torch.inf)
        values = facts.v_block_mean + field("v_mean")[..., : shape.channels].unsqueeze(2)
        tiny = torch.finfo(torch.float32).tiny
        unit = torch.linalg.vector_norm(values, torch.inf, (-1, -2), True).clamp_(min=tiny)
        values = torch.div(values, unit).half()
        return cls(
            order,
            workspace,
            shape,
            int(element),
            facts,
            valid,
            ranked,
            log_counts,
            values,
            unit,
        )


def _distances(
    sample: Sample, keys: _Keys, query_blocks: Sequence[int], tokens: Tensor
) -> Distances:
    q = sample.q.index_select(2, tokens.flatten().clamp(min=0))
    buckets = _buckets(sample, keys, query_blocks)
    pooled = _pooled_parts(sample, keys, q, buckets)  # first, while its operands have the room
    exact = _exact_parts(sample, keys, q, buckets)
    return distances(exact, pooled, keys.facts.of_query_heads(keys.unit))


def _buckets(sample: Sample, keys: _Keys, query_blocks: Sequence[int]) -> Tensor:
    """(B, H, routers, S, nk) int64: see `CandidateSet.buckets`."""
    # Heads that share keys stand as query blocks of one head.
    means = _at(keys.facts.q_block_mean, 2, query_blocks)
    by_kv_head = means.view(means.shape[0], keys.shape.kv_heads, -1, means.shape[-1])
    facts = replace(keys.facts, q_block_mean=by_kv_head)
    mass, error = log_scores(facts, sample.scale, keys.valid[:, None, None])
    scores = {Router.MASS: mass, Router.ERROR: error}
    by_router = [scores[router].view(*means.shape[:3], -1) for router in sample.candidates.routers]
    ranked = keys.ranked[:, None, None, None]
    rank = rank_blocks(torch.stack(by_router, 2).masked_fill_(~ranked, -torch.inf))
    return sample.candidates.buckets(
        rank.masked_fill_(~ranked, -1), keys.valid[:, None, None, None]
    )


def _exact_parts(sample: Sample, keys: _Keys, q: Tensor, buckets: Tensor) -> Partial:
    """(routers, T, B, H, S, 128, ...): each sampled block attends to each bucket of key blocks, as
    a query block of its own."""
    routers, count = buckets.shape[2], sample.candidates.shape[1]
    inside = buckets.unsqueeze(3) == _column(count, buckets)
    rows = q.repeat(1, 1, routers * count, 1)
    shape = [*keys.shape.sizes()[:3], rows.shape[2], *keys.shape.sizes()[4:]]
    sums = torch.empty(rows.shape, dtype=torch.float32, device=q.device)
    row_max = sums.new_empty(sums.shape[:3])
    row_sum = torch.empty_like(row_max)
    ops.attend(
        rows,
        keys.workspace,
        pack(inside.flatten(2, 4)),
        shape,
        keys.element,
        True,
        sample.key_lengths,
        None,
        sample.scale,
        PV_FILTER_OFF,
        False,
        False,
        rows,  # what is not asked for goes where every row was read before it is written
        None,
        sums,
        row_max,
        row_sum,
        None,
    )
    split = (routers, count, -1, QUERY_BLOCK)
    return Partial(
        *(x.unflatten(2, split).movedim((2, 3), (0, 1)) for x in (sums, row_max, row_sum))
    )


def _pooled_parts(sample: Sample, keys: _Keys, q: Tensor, buckets: Tensor) -> Partial:
    """(routers, T - 1, B, H, S, 128, ...): of each density the blocks beyond it, as pseudo-keys
    around one maximum a row; what underflows counts for nothing."""
    p, row_max = _pseudo_keys(sample, keys, q)
    beyond = buckets.unsqueeze(3) > _column(sample.candidates.shape[1] - 1, buckets)
    blocks = buckets.shape[3]
    batch, heads, routers, densities = beyond.shape[:4]
    sums = p.new_empty(blocks, batch, heads, routers, densities, QUERY_BLOCK, q.shape[-1])
    row_sums = [
        _pooled_block(p[:, :, s], beyond[..., s, :], keys.values, sums[s]) for s in range(blocks)
    ]
    row_sum = torch.stack(row_sums)
    order = (3, 4, 1, 2, 0, 5)
    row_sum = row_sum.permute(order)
    return Partial(sums.permute(*order, 6), row_max.expand_as(row_sum), row_sum)


def _pooled_block(p: Tensor, beyond: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """Writes the sums (B, H, routers, T - 1, 128, D) of one query block with p (B, H, 128, nk), and
    gives its row sums. A function of its own so that what it multiplies is freed."""
    p = p[:, :, None, None] * beyond.unsqueeze(4)
    by_kv_head = (values.shape[0], values.shape[1], -1)
    torch.matmul(
        p.view(*by_kv_head, values.shape[2]), values, out=out.view(*by_kv_head, values.shape[3])
    )
    return p.sum(-1, dtype=torch.float32)


def _pseudo_keys(sample: Sample, keys: _Keys, q: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (B, H, S, 128, nk) fp16 of all pseudo-keys, of the row's maximum (B, H, S, 128)."""
    batch, heads, rows, channels = q.shape
    kv = batch * keys.shape.kv_heads
    bias = keys.log_counts[:, None, None].expand(-1, keys.shape.kv_heads, -1, -1)
    logits = torch.baddbmm(
        bias.reshape(kv, 1, -1),
        q.float().view(kv, -1, channels),
        keys.facts.k_block_mean.flatten(0, 1).transpose(-1, -2),
        alpha=sample.scale * LOG2_E,
    )
    row_max = logits.amax(-1, keepdim=True)
    p = logits.sub_(finite(row_max)).exp2_().half()
    by_block = (batch, heads, rows // QUERY_BLOCK, QUERY_BLOCK)
    return p.view(*by_block, -1), row_max.view(by_block)


def _column(count: int, like: Tensor) -> Tensor:
    """0 .. count - 1 of (count, 1, 1)."""
    return torch.arange(count, device=like.device)[:, None, None]

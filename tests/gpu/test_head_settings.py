# SPDX-License-Identifier: Apache-2.0
"""Token orders, budgets per head and the pooled residual: kernels against the emulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge import AttentionStats, HeadSettings, Router, SparsePolicy, TokenGrid, cube_order
from sparge import attention as public_attention
from sparge.blocks import KEY_BLOCK, unpack
from sparge.call import Call, make_call
from sparge.common.metrics import rel_l2
from sparge.kernels import Element
from sparge.reference import (
    Quantized,
    Route,
    attend,
    exact_attention,
    poolable,
    quantize_qkv,
    scatter,
)
from sparge.reference import route as reference_route
from sparge.stages.pipeline import quantize, route
from sparge.stages.workspace import WorkspaceLayout
from tests.gpu.cases import Case, lengths_of, make_qkv
from tests.gpu.conftest import HOPPER, Kernels, assert_same_lse
from tests.gpu.test_stages import (
    ELEMENTS,
    TIGHT,
    means_of,
    with_element,
)

pytestmark = pytest.mark.gpu

KERNELS = [*map(Kernels, ELEMENTS), *HOPPER]
every_kernel = pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.id)
GAINS = (0.0, 0.5, 1.0, 1.2)
CONTRASTS = (1.0, 1.3, 0.6, 1.1, 0.9)
DENSITIES = (0.1, 0.3, 0.25, 0.6)


PLAIN = SparsePolicy()
FILTERED = SparsePolicy(select_by="cdf", pvthreshd=9.0)


@dataclass(frozen=True)
class Job:
    case: Case
    grid: TokenGrid | None
    policy: SparsePolicy


def of_grid(reason: str, grid: TokenGrid, **more: Any) -> Job:
    policy = more.pop("policy", PLAIN)
    case = Case(reason, queries=grid.tokens, keys=grid.tokens, heads=4, **more)
    return Job(case, grid, policy)


def in_raster(reason: str, policy: SparsePolicy = PLAIN, **more: Any) -> Job:
    return Job(Case(reason, **{"heads": 4, "kv_heads": 2, **more}), None, policy)


JOBS = (
    of_grid("text first", TokenGrid(5, 9, 11, prefix=70), kv_heads=2),
    of_grid(
        "text last, cdf and filter", TokenGrid(6, 8, 9, suffix=45), kv_heads=4, policy=FILTERED
    ),
    of_grid(
        "key lengths cut the text",
        TokenGrid(3, 8, 9, suffix=100),
        batch=2,
        key_lengths=(216, 250),
        head_dim=64,
        kv_heads=2,
    ),
    of_grid("lead frame, NHD", TokenGrid(7, 10, 13, lead_frames=1), layout="NHD", kv_heads=4),
    of_grid("a tail", TokenGrid(5, 10, 13, prefix=30, tail=93), kv_heads=4),
    of_grid("one token in each segment", TokenGrid(1, 1, 1, prefix=1, suffix=1), kv_heads=4),
    of_grid("head_dim 40, an odd number of blocks", TokenGrid(4, 11, 16), head_dim=40, kv_heads=1),
    of_grid("three tiles of pseudo-keys", TokenGrid(9, 30, 33, prefix=3), kv_heads=4, head_dim=64),
    in_raster("ragged", queries=1999, keys=1999),
    in_raster("causal", causal=True, queries=1500, keys=1500, head_dim=64),
    in_raster("causal and filter", FILTERED, causal=True, queries=1100, keys=1100),
    in_raster("key lengths", batch=3, key_lengths=(0, 70, 799)),
    in_raster("more keys than queries", queries=200, keys=5000, head_dim=64),
    in_raster("K outliers", data="outliers"),
    in_raster("zeros", data="zeros", queries=500, keys=500),
    in_raster("fp16", dtype=torch.float16, queries=1300, keys=1300),
    in_raster("sink and gate", SparsePolicy(attention_sink=True, simthreshd1=0.4)),
)


def budget_of(heads: int, *, scaled: bool = False) -> HeadSettings:
    """A pool weight, a density and a router for each head, all different."""

    def spread(values: tuple[float, ...]) -> Tensor:
        return torch.tensor([values[head % len(values)] for head in range(heads)], device="cuda")

    routers = torch.tensor([Router.MASS, Router.ERROR, Router.ERROR, Router.MASS], device="cuda")
    index = torch.arange(heads, device="cuda") % 4
    return HeadSettings(
        spread(DENSITIES),
        spread(GAINS),
        routers[index].int(),
        floor=2,
        output_scale=spread(CONTRASTS) if scaled else None,
    )


@dataclass(frozen=True, eq=False)
class Prepared:
    """A call, what the kernels made of its operands, and the same in the reference."""

    call: Call
    fields: dict[str, Tensor]
    operands: Quantized
    kept: Tensor

    @property
    def scale(self) -> float:
        return self.call.scale


def prepare(job: Job, element: Element, generator: torch.Generator) -> Prepared:
    case = job.case
    q, k, v = make_qkv(case, generator)
    order = None if job.grid is None else cube_order(job.grid)
    lengths = lengths_of(case)
    policy = with_element(job.policy, element)
    centred = element in (Element.INT8_FP16, Element.INT8_E4M3)
    head_settings = budget_of(case.heads, scaled=centred and not case.causal)
    call = make_call(
        q, k, v, policy, "HND", case.causal, None, lengths, None, None, order, head_settings
    )
    workspace = quantize(call)
    layout = WorkspaceLayout(
        call.shape, call.element, with_values=True, with_queries=True, with_pools=True
    )
    fields = {name: layout.view(workspace, name) for name in layout.fields}
    means = means_of(fields, element, case.head_dim)
    operands = quantize_qkv(q, k, v, call.order, element=element, key_lengths=lengths, **means)
    block_map, counts = route(call, workspace, None)
    kept = unpack(block_map, call.shape.key_blocks)
    assert torch.equal(counts, kept.sum(-1, dtype=torch.int32))
    return Prepared(call, fields, operands, kept)


def element_for(kernels: Kernels, case: Case) -> Element:
    fp16 = case.dtype == torch.float16 and kernels.element is Element.BF16
    return Element.FP16 if fp16 else kernels.element


def choose(got: Prepared) -> Route:
    call = got.call
    return reference_route(
        got.operands, call.policy, call.head_settings, scale=got.scale, is_causal=call.is_causal
    )


@every_kernel
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.case.id)
def test_output(
    job: Job,
    kernels: Kernels,
    generator: torch.Generator,
    poison: None,
    force: Callable[[Kernels], None],
) -> None:
    element = element_for(kernels, job.case)
    force(replace(kernels, element=element))
    got = prepare(job, element, generator)
    call, operands = got.call, got.operands
    assert call.v is not None and call.head_settings is not None
    stats = AttentionStats("cuda")
    out, lse = public_attention(
        call.q,
        call.k,
        call.v,
        call.policy,
        is_causal=call.is_causal,
        key_lengths=call.key_lengths,
        order=call.order,
        head_settings=call.head_settings,
        stats=stats,
        output_dtype=torch.float32,
        return_lse=True,
    )
    assert torch.isfinite(out).all()
    routed = choose(got)
    pool_weights = (call.head_settings.pool_weight > 0)[:, None, None]
    pooled = poolable(routed.valid & ~got.kept & pool_weights, call.is_causal)
    asked, centred = call.head_settings.output_scale, element.name.startswith("INT8")
    assert (asked is not None) == (centred and not call.is_causal)
    output_scale = 1.0 if asked is None else asked
    emulated = attend(
        operands,
        got.kept,
        pooled,
        call.head_settings.pool_weight,
        output_scale=output_scale,
        scale=got.scale,
        is_causal=call.is_causal,
        pvthreshd=call.policy.pvthreshd,
        softmax=kernels.softmax,
    )
    truth = scatter(emulated.out, call.order)
    size = truth.norm().clamp(min=1e-3)
    assert (out - truth).norm() / size <= TIGHT[element]
    assert_same_lse(lse, scatter(emulated.lse, call.order), kernels, 2e-3)
    counted = replace(routed, kept=got.kept)
    kept, valid, skipped, blocks = stats.counters.tolist()
    assert blocks == int(got.kept.sum())
    assert kept == int(counted.kept_pairs().sum()) and valid == int(counted.valid_pairs().sum())
    assert skipped == pytest.approx(int(emulated.pv_skipped.sum()), rel=0.05, abs=128 * KEY_BLOCK)

    exact, _ = exact_attention(
        call.q,
        call.k,
        call.v,
        got.kept,
        pooled,
        call.head_settings.pool_weight,
        output_scale=output_scale,
        mean_values=operands.vbar,
        order=call.order,
        is_causal=call.is_causal,
        key_lengths=call.key_lengths,
    )
    assert rel_l2(out, exact) <= 1.2 * rel_l2(truth, exact) + TIGHT[element]


def test_key_lengths_that_cut_the_grid_give_no_numbers(generator: torch.Generator) -> None:
    """A device without a synchronisation cannot raise: the rows say it."""
    grid = TokenGrid(4, 8, 10)
    q, k, v = make_qkv(Case("cut", queries=grid.tokens, keys=grid.tokens), generator)
    lengths = torch.tensor([grid.tokens // 2], dtype=torch.int32, device="cuda")
    out = public_attention(
        q, k, v, SparsePolicy(topk=1.0), order=cube_order(grid), key_lengths=lengths
    )
    assert out.isnan().any()

# SPDX-License-Identifier: Apache-2.0
"""Token orders, budgets per head and the pooled residual: kernels against the emulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge import AttentionStats, HeadBudget, Router, SparsePolicy, TokenGrid, cube_order
from sparge import attention as public_attention
from sparge.blocks import KEY_BLOCK, unpack
from sparge.call import Call, make_call
from sparge.common.metrics import rel_l2
from sparge.kernels import Element
from sparge.order.grid import TokenOrder
from sparge.reference import (
    Choice,
    Packed,
    attend_packed,
    choose_blocks,
    error_scores,
    exact_pooled_attention,
    mass_scores,
    pack_qkv,
    poolable,
    scatter,
)
from sparge.reference.scores import LEAST_ERROR
from sparge.stages.launch import find_kernel
from sparge.stages.pipeline import quantize, route
from sparge.stages.workspace import WorkspaceLayout
from tests.gpu.cases import Case, make_qkv
from tests.gpu.conftest import HOPPER, Kernels, assert_same_lse
from tests.gpu.test_stages import ELEMENTS, TIGHT, key_rows, value_levels, with_element

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


def budget_of(heads: int, *, scaled: bool = False) -> HeadBudget:
    """A gain, a density and a router for each head, all different."""

    def spread(values: tuple[float, ...]) -> Tensor:
        return torch.tensor([values[head % len(values)] for head in range(heads)], device="cuda")

    routers = torch.tensor([Router.MASS, Router.ERROR, Router.ERROR, Router.MASS], device="cuda")
    index = torch.arange(heads, device="cuda") % 4
    return HeadBudget(
        spread(DENSITIES),
        spread(GAINS),
        routers[index].int(),
        floor=2,
        contrast=spread(CONTRASTS) if scaled else None,
    )


@dataclass(frozen=True, eq=False)
class Prepared:
    """A call, what the kernels made of its operands, and the same in the reference."""

    call: Call
    fields: dict[str, Tensor]
    packed: Packed
    kept: Tensor

    @property
    def scale(self) -> float:
        return self.call.scale


def prepare(job: Job, element: Element, generator: torch.Generator) -> Prepared:
    case = job.case
    q, k, v = make_qkv(case, generator)
    order = None if job.grid is None else cube_order(job.grid)
    lengths = None
    if case.key_lengths is not None:
        lengths = torch.tensor(case.key_lengths, dtype=torch.int32, device="cuda")
    policy = with_element(job.policy, element)
    centred = element in (Element.INT8_FP16, Element.INT8_E4M3)
    budget = budget_of(case.heads, scaled=centred and not case.causal)
    call = make_call(q, k, v, policy, "HND", case.causal, None, lengths, None, None, order, budget)
    workspace = quantize(call)
    layout = WorkspaceLayout(
        call.shape, call.element, with_values=True, with_queries=True, with_pools=True
    )
    fields = {name: layout.view(workspace, name) for name in layout.fields}
    means: dict[str, Any] = {}
    if element.name.startswith("INT8"):
        names = {"kbar": "k_mean", "vbar": "v_mean", "v_scale": "v_scale"}
        means = {name: fields[field][..., : case.head_dim] for name, field in names.items()}
    packed = pack_qkv(q, k, v, call.order, element=element, key_lengths=lengths, **means)
    block_map, counts = route(call, workspace, None)
    kept = unpack(block_map, call.shape.key_blocks)
    assert torch.equal(counts, kept.sum(-1, dtype=torch.int32))
    return Prepared(call, fields, packed, kept)


def element_for(kernels: Kernels, case: Case) -> Element:
    fp16 = case.dtype == torch.float16 and kernels.element is Element.BF16
    return Element.FP16 if fp16 else kernels.element


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.case.id)
def test_statistics_and_pseudo_keys(
    job: Job, element: Element, generator: torch.Generator, poison: None, force
) -> None:
    kernels = Kernels(element)
    element = element_for(kernels, job.case)
    force(replace(kernels, element=element))
    got = prepare(job, element, generator)
    fields, packed, d = got.fields, got.packed, job.case.head_dim
    operands = packed.operands
    counts = operands.key_counts.unsqueeze(1).expand_as(fields["key_counts"])
    assert torch.equal(fields["key_counts"], counts)

    def by_block(name: str) -> Tensor:
        return fields[name][..., :d]

    torch.testing.assert_close(
        by_block("k_block_mean"), operands.k_block_mean, rtol=1e-4, atol=2e-5
    )
    variance, value = by_block("k_variance").float(), by_block("v_block_mean").float()
    size = packed.v_block_mean.abs().amax() + 1e-6  # below: bf16 rounds by up to 2^-8
    torch.testing.assert_close(variance, packed.k_variance, rtol=5e-3, atol=1e-4)
    torch.testing.assert_close(value / size, packed.v_block_mean / size, rtol=4e-3, atol=1e-5)
    # The kernel takes the mean of squares less the square of the mean.
    room = 1e-5 * d * (packed.v_block_mean.square().amax() + packed.v_variance.amax() / d) + 1e-12
    torch.testing.assert_close(fields["v_variance"], packed.v_variance, rtol=2e-3, atol=float(room))

    square = value.square().sum(-1)
    torch.testing.assert_close(fields["v_square"], square, rtol=1e-3, atol=float(1e-6 * size**2))

    blocks, int8 = call_blocks(got), element.name.startswith("INT8")
    head_dim = got.call.shape.head_dim
    columns = fields["pool_columns"].flatten(2, 3)[:, :, :blocks]
    expected_bias = counts.float().log2()
    torch.testing.assert_close(columns[..., 1], expected_bias, rtol=1e-5, atol=1e-6)
    rows = key_rows(fields["pool_k"], head_dim * (1 if int8 else 2))
    dtype = torch.int8 if int8 else (torch.float16 if element is Element.FP16 else torch.bfloat16)
    keys = rows.view(dtype).flatten(2, 3)[:, :, :blocks, :d].float()
    means = operands.k_block_mean
    level = columns[..., :1] if int8 else means.abs().amax(-1, keepdim=True) * 2.0**-7
    assert ((keys * columns[..., :1] - means).abs() <= 0.51 * level + 1e-6).all()
    values = value_levels(fields["pool_v"], element, head_dim)
    assert values[:, :, blocks:].abs().sum() == 0, "columns past the last block are zero"
    scale = operands.v_scale.unsqueeze(2) if int8 else 1.0
    assert rel_l2(values[:, :, :blocks, :d] * scale, packed.v_block_mean) <= 0.04


def call_blocks(got: Prepared) -> int:
    return got.call.shape.key_blocks


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.case.id)
def test_routing(job: Job, generator: torch.Generator, poison: None, force) -> None:
    """The kernel's choice is the reference's, but where scores tie to rounding."""
    element = element_for(Kernels(Element.BF16), job.case)
    force(Kernels(element))
    got = prepare(job, element, generator)
    choice = choose(got)
    differs = got.kept != choice.kept
    if job.case.data == "zeros":
        return  # every score is the same up to rounding
    budget = got.call.budget
    assert budget is not None
    errors = error_scores(got.packed, got.scale, choice.valid)
    by_error = (budget.router == Router.ERROR)[:, None, None]
    scores = torch.where(by_error, errors, mass_scores(got.packed, got.scale))
    least = float(torch.tensor(LEAST_ERROR).log() / 2) + 1
    for row in differs.any(-1).nonzero():
        at = tuple(row.tolist())
        tied = scores[at][differs[at]]
        if job.policy.select_by == "cdf" and len(tied) == 1:
            continue  # the mass of one block may lie on either side of the target
        if (tied < least).all():
            continue  # blocks that pool without any error at all
        assert tied.max() - tied.min() <= 2e-3 * (1 + tied.abs().max()), "not a tie"


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.case.id)
def test_query_blocks_choose_alone(
    job: Job,
    rows: int,
    generator: torch.Generator,
    poison: None,
    force,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many share a thread block: of long sequences the scores of fewer fit in it."""
    element = element_for(Kernels(Element.BF16), job.case)
    force(Kernels(element))
    call = prepare(job, element, generator).call
    workspace = quantize(call)

    def routed() -> tuple[Tensor, ...]:
        counters = AttentionStats("cuda").counters
        return *route(call, workspace, counters), counters

    expected = routed()
    kernel = find_kernel("route", workspace.device, call.shape.head_dim)
    monkeypatch.setattr(kernel.sizes, "rows", rows)
    for found, wanted in zip(routed(), expected, strict=True):
        assert torch.equal(found, wanted)


def choose(got: Prepared) -> Choice:
    call = got.call
    return choose_blocks(
        got.packed, call.policy, call.budget, scale=got.scale, is_causal=call.is_causal
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
    call, packed = got.call, got.packed
    assert call.v is not None and call.budget is not None
    stats = AttentionStats("cuda")
    out, lse = public_attention(
        call.q,
        call.k,
        call.v,
        call.policy,
        is_causal=call.is_causal,
        key_lengths=call.key_lengths,
        order=call.order,
        budget=call.budget,
        stats=stats,
        output_dtype=torch.float32,
        return_lse=True,
    )
    assert torch.isfinite(out).all()
    choice = choose(got)
    gains = (call.budget.gain > 0)[:, None, None]
    pooled = poolable(packed, choice.valid & ~got.kept & gains, call.is_causal)
    asked, centred = call.budget.contrast, element.name.startswith("INT8")
    assert (asked is not None) == (centred and not call.is_causal)
    contrast = 1.0 if asked is None else asked
    emulated = attend_packed(
        packed,
        got.kept,
        pooled,
        call.budget.gain,
        contrast=contrast,
        scale=got.scale,
        is_causal=call.is_causal,
        pvthreshd=call.policy.pvthreshd,
        softmax=kernels.softmax,
    )
    truth = in_token_order(emulated.out, call.order)
    size = truth.norm().clamp(min=1e-3)
    assert (out - truth).norm() / size <= TIGHT[element]
    assert_same_lse(lse, in_token_order(emulated.lse, call.order), kernels, 2e-3)
    counted = replace(choice, kept=got.kept)
    kept, valid, skipped, blocks = stats.counters.tolist()
    assert blocks == int(got.kept.sum())
    assert kept == int(counted.kept_pairs().sum()) and valid == int(counted.valid_pairs().sum())
    assert skipped == pytest.approx(int(emulated.pv_skipped.sum()), rel=0.05, abs=128 * KEY_BLOCK)

    exact, _ = exact_pooled_attention(
        call.q,
        call.k,
        call.v,
        got.kept,
        pooled,
        call.budget.gain,
        contrast=contrast,
        mean_values=packed.operands.vbar,
        order=call.order,
        is_causal=call.is_causal,
        key_lengths=call.key_lengths,
    )
    assert rel_l2(out, exact) <= 1.2 * rel_l2(truth, exact) + TIGHT[element]


def in_token_order(rows: Tensor, order: TokenOrder | None) -> Tensor:
    return rows if order is None else scatter(rows, order)


def test_an_order_changes_nothing_where_nothing_is_dropped(generator: torch.Generator) -> None:
    grid = TokenGrid(9, 14, 17, prefix=40)
    q, k, v = make_qkv(Case("order", queries=grid.tokens, keys=grid.tokens), generator)
    dense = SparsePolicy(topk=1.0)
    plain = public_attention(q, k, v, dense, output_dtype=torch.float32)
    cubes = public_attention(q, k, v, dense, order=cube_order(grid), output_dtype=torch.float32)
    assert rel_l2(cubes, plain) < 0.02  # INT8 scales of other groups of 64 keys


def test_key_lengths_that_cut_the_grid_give_no_numbers(generator: torch.Generator) -> None:
    """A device without a synchronisation cannot raise: the rows say it."""
    grid = TokenGrid(4, 8, 10)
    q, k, v = make_qkv(Case("cut", queries=grid.tokens, keys=grid.tokens), generator)
    lengths = torch.tensor([grid.tokens // 2], dtype=torch.int32, device="cuda")
    out = public_attention(
        q, k, v, SparsePolicy(topk=1.0), order=cube_order(grid), key_lengths=lengths
    )
    assert out.isnan().any()


def test_a_head_without_gain_computes_what_plain_dropping_does(generator: torch.Generator) -> None:
    q, k, v = make_qkv(Case("plain", heads=2, queries=3000, keys=3000), generator)
    uniform = HeadBudget.uniform(2, 0.3, device="cuda")
    mixed = HeadBudget(
        uniform.density, torch.tensor([0.0, 1.0], device="cuda"), uniform.router, pools=True
    )
    plain = public_attention(q, k, v, SparsePolicy(topk=0.3), budget=uniform)
    pooled = public_attention(q, k, v, SparsePolicy(topk=0.3), budget=mixed)
    assert torch.equal(plain[:, 0], pooled[:, 0])
    assert not torch.equal(plain[:, 1], pooled[:, 1])


def test_densities_set_in_place_count_in_the_next_call(generator: torch.Generator) -> None:
    q, k, v = make_qkv(Case("denser", heads=2, queries=2000, keys=2000), generator)
    budget = HeadBudget.uniform(2, 0.1, gain=1.0, device="cuda")
    policy = SparsePolicy()
    public_attention(q, k, v, policy, budget=budget)
    budget.set_density(torch.tensor([0.1, 0.8], device="cuda"))
    fresh = HeadBudget(budget.density.clone(), budget.gain, budget.router)
    changed = public_attention(q, k, v, policy, budget=budget)
    assert torch.equal(changed, public_attention(q, k, v, policy, budget=fresh))

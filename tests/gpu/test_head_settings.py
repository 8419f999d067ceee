# SPDX-License-Identifier: Apache-2.0
"""Token orders and head settings: kernels against the emulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge import (
    AttentionStats,
    HeadSettings,
    Router,
    SparsePolicy,
    TokenGrid,
    TokenOrder,
    attention,
    grid_order,
)
from sparge.blocks import KEY_BLOCK, unpack
from sparge.kernels import Element
from sparge.reference import Route, log_scores, poolable
from sparge.reference import route as reference_route
from sparge.reference.scores import LEAST_ERROR
from tests.gpu.cases import Case, lengths_of, make_qkv
from tests.gpu.conftest import (
    Kernels,
    assert_emulated,
    assert_ties,
    every_kernel,
    in_float32,
    with_element,
    workspaces,
)
from tests.gpu.test_stages import means_of
from tests.oracle import Quantized, attend, quantize_qkv

pytestmark = pytest.mark.gpu

DENSITIES = (0.1, 0.3, 1.0, 0.6)  # where a head keeps all, nothing is scored
GAINS = (0.0, 0.5, 1.0, 1.2)
CONTRASTS = (1.0, 1.3, 0.6, 1.1, 0.9)
ROUTERS = (Router.MASS, Router.ERROR, Router.ERROR, Router.MASS)
#: Order kinds of four heads; 7 is none of the token orders and means the last.
HEAD_WALK = (0, 1, 7, 0)

PLAIN = SparsePolicy()
FILTERED = SparsePolicy(select_by="cdf", pvthreshd=9.0)


@dataclass(frozen=True)
class Job:
    case: Case
    grid: TokenGrid | None
    policy: SparsePolicy


def of_grid(
    reason: str, grid: TokenGrid, kv_heads: int = 4, policy: SparsePolicy = PLAIN, **more: Any
) -> Job:
    tokens = {"queries": grid.tokens, "keys": grid.tokens}
    return Job(Case(reason, heads=4, kv_heads=kv_heads, **tokens, **more), grid, policy)


def in_raster(reason: str, policy: SparsePolicy = PLAIN, **more: Any) -> Job:
    return Job(Case(reason, heads=4, **{"kv_heads": 2, **more}), None, policy)


CUT = TokenGrid(3, 8, 9, suffix=100)
JOBS = (
    of_grid("text first", TokenGrid(5, 9, 11, prefix=70), kv_heads=2),
    of_grid("text last, cdf and filter", TokenGrid(6, 8, 9, suffix=45), policy=FILTERED),
    of_grid("key lengths cut the text", CUT, 2, batch=2, key_lengths=(216, 250), head_dim=64),
    of_grid("lead frame, NHD", TokenGrid(7, 10, 13, lead_frames=1), layout="NHD"),
    of_grid("a tail", TokenGrid(5, 10, 13, prefix=30, tail=93)),
    of_grid("one token in each segment", TokenGrid(1, 1, 1, prefix=1, suffix=1)),
    of_grid("head_dim 40, an odd number of blocks", TokenGrid(4, 11, 16), 1, head_dim=40),
    of_grid("three tiles of pseudo-keys", TokenGrid(9, 30, 33, prefix=3), head_dim=64),
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


def settings_of(heads: int, *, scaled: bool = False) -> HeadSettings:
    """A pool weight, a density and a router for each head, all different."""

    def spread(values: tuple[float, ...]) -> Tensor:
        return torch.tensor([values[head % len(values)] for head in range(heads)], device="cuda")

    output_scale = spread(CONTRASTS) if scaled else None
    routers = spread(ROUTERS).int()
    return HeadSettings(spread(DENSITIES), spread(GAINS), routers, output_scale=output_scale)


def with_orders(head_settings: HeadSettings) -> HeadSettings:
    """The settings of four heads, which take different token orders."""
    order_kind = torch.tensor(HEAD_WALK, dtype=torch.int32, device=head_settings.density.device)
    return replace(head_settings, order_kind=order_kind)


@dataclass(frozen=True, eq=False)
class Drawn:
    """A call of a job."""

    q: Tensor
    k: Tensor
    v: Tensor
    policy: SparsePolicy
    settings: HeadSettings
    order: TokenOrder | None
    key_lengths: Tensor | None
    is_causal: bool

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def attend(self, **options: Any) -> Any:
        return attention(
            self.q,
            self.k,
            self.v,
            self.policy,
            head_settings=self.settings,
            order=self.order,
            key_lengths=self.key_lengths,
            is_causal=self.is_causal,
            **options,
        )


def drawn(job: Job, element: Element, generator: torch.Generator) -> Drawn:
    case = job.case
    return Drawn(
        *make_qkv(case, generator),
        with_element(job.policy, element),
        settings_of(case.heads, scaled=element.quantized and not case.causal),
        None if job.grid is None else grid_order(job.grid).on("cuda"),
        lengths_of(case),
        case.causal,
    )


@every_kernel
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.case.id)
def test_output(job: Job, kernels: Kernels, generator, poison, force) -> None:
    kernels = kernels.of_dtype(job.case.dtype)
    force(kernels)
    call, stats = drawn(job, kernels.element, generator), AttentionStats("cuda")
    with workspaces() as found:
        out, lse = call.attend(stats=stats, output_dtype=torch.float32, return_lse=True)
    fields, settings = found[0].fields(), call.settings
    kept = unpack(fields["block_map"], found[0].layout.shape.key_blocks)
    given: dict[str, Any] = {"order": call.order, "key_lengths": call.key_lengths}
    means = means_of(fields, kernels.element, job.case.head_dim)
    operands = quantize_qkv(call.q, call.k, call.v, **given, element=kernels.element, **means)
    rules: dict[str, Any] = {"scale": call.scale, "is_causal": call.is_causal}
    routed = reference_route(operands, call.policy, settings, **rules)
    if not kernels.element.quantized and job.case.data != "zeros":
        check_routing(call, operands, kept, routed)  # of zeros every score is alike to rounding
    dropped = routed.valid & ~kept & (settings.pool_weight > 0)[:, None, None]
    rules |= {"kept": kept, "pooled": poolable(dropped, call.is_causal)}
    rules["pool_weight"] = settings.pool_weight
    rules["output_scale"] = 1.0 if settings.output_scale is None else settings.output_scale
    filtered = {"pvthreshd": call.policy.pvthreshd, "softmax": kernels.softmax}
    emulated = attend(operands, **rules, **filtered)
    exact = in_float32(call.q, call.k, call.v, vbar=operands.vbar, **given, **rules)
    assert_emulated(kernels, out, lse, emulated.out, emulated.lse, exact, lse_tolerance=2e-3)
    by_map = replace(routed, kept=kept)
    pairs, valid, skipped, blocks = stats.counters.tolist()
    assert blocks == int(kept.sum())
    assert pairs == int(by_map.kept_pairs().sum()) and valid == int(by_map.valid_pairs().sum())
    assert skipped == pytest.approx(int(emulated.pv_skipped.sum()), rel=0.05, abs=128 * KEY_BLOCK)


def check_routing(call: Drawn, operands: Quantized, kept: Tensor, routed: Route) -> None:
    """The kernel's choice is the reference's, but where scores tie to rounding."""
    by_mass, by_error = log_scores(operands, call.scale, routed.valid)
    takes_error = (call.settings.router == Router.ERROR)[:, None, None]
    scores = torch.where(takes_error, by_error, by_mass)
    # Below it are blocks that pool without any error at all.
    least = float(torch.tensor(LEAST_ERROR).log() / 2) + 1
    by_cdf = call.policy.select_by == "cdf"
    assert_ties(kept != routed.kept, scores.clamp(min=least), 2e-3, one_alone=by_cdf)


@every_kernel
@pytest.mark.parametrize(
    "job",
    [JOBS[0], JOBS[2], JOBS[3], of_grid("an image", TokenGrid(1, 40, 30))],
    ids=lambda job: job.case.id,
)
def test_each_head_computes_to_the_bit_what_it_does_where_all_take_its_order(
    job: Job, kernels: Kernels, generator, poison, force
) -> None:
    force(kernels)
    case, grid = job.case, job.grid
    assert grid is not None
    q, k, v = make_qkv(case, generator)
    order, settings, lengths = grid_order(grid), settings_of(case.heads), lengths_of(case)

    def run(order, head_settings) -> tuple[Tensor, Tensor]:
        options = {"order": order, "head_settings": head_settings, "key_lengths": lengths}
        return attention(q, k, v, PLAIN, return_lse=True, **options)

    mixed, mixed_lse = run(order, with_orders(settings))
    group = case.heads // case.kv_heads
    taken = [min(HEAD_WALK[head // group * group], 1) for head in range(case.heads)]
    assert order.order_kinds == 2 == len(set(taken))
    for head, index in enumerate(taken):
        out, lse = run(order.of_kind(index), settings)
        assert torch.equal(mixed[:, head], out[:, head])
        assert torch.equal(mixed_lse[:, head], lse[:, head])

# SPDX-License-Identifier: Apache-2.0
"""Candidates beside what attention keeps of them, and choices beside all the choices there are."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sparge
from sparge import Unsupported
from sparge.head_settings import HeadSettings, Router
from sparge.order.grid import TokenGrid, TokenOrder, grid_order, raster_order
from sparge.policy import Precision, SparsePolicy
from sparge.reference import Operands, route
from sparge.session.choose import LEAST_WEIGHT, ROUNDING, ChosenSettings, Curves
from sparge.session.measure import MEASURED, POOL_WEIGHTS, Candidates, Measured, Sums, kept_shares
from sparge.thresholds import COLUMNS
from tests.session.parts import CPU, GRID, SETTINGS

attention: Any = sparge.attention
pytestmark = pytest.mark.usefixtures("one_thread")


def known_shares(order: TokenOrder) -> list[float]:
    """Those of the measured densities."""
    return kept_shares(order, [max(1, int(density * order.key_blocks)) for density in MEASURED])


ORDERS = {
    "text": grid_order(TokenGrid(5, 9, 13, prefix=70, suffix=33)).of_kind(0),
    "lead": grid_order(TokenGrid(7, 6, 13, lead_frames=1)).of_kind(0),
    "raster": raster_order(1000),
    "a block more than whole steps": raster_order(5 * 64),
    "one block": raster_order(50),
    "two orders": grid_order(TokenGrid(6, 14, 16, prefix=10)),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_attention_keeps_what_was_asked_for(make_qkv, order: TokenOrder) -> None:
    """A head for each density, measured ones last. Ranked blocks count as their mean."""
    found = Candidates.of(order, CPU)
    asked = torch.cat([found.asked, torch.tensor(found.measured)])
    q, k, v = make_qkv(1, len(asked), order.tokens, 16, kv_heads=1)
    x = Operands.of(q, k, v, order)
    router = torch.full((len(asked),), Router.ERROR, dtype=torch.int32)
    settings = HeadSettings(asked, torch.ones(len(asked)), router)
    kept = route(x, SparsePolicy(), settings, scale=0.25).kept[0]
    keys = order.block_counts.double()
    keys[~order.keys_exact] = keys[~order.keys_exact].mean()
    pairs = torch.outer(order.query_counts().double(), keys)
    shares = (kept * pairs).sum((1, 2)) / pairs.sum()
    expected = [*found.kept.tolist(), *known_shares(order)]
    assert shares.tolist() == pytest.approx(expected, abs=1e-9)
    assert float(found.kept[-1]) == 1, "and not nearly 1"
    pooling = [share + (1 / 64 if share < 1 else 0) for share in found.kept.tolist()]
    assert found.costs().tolist() == [found.kept.tolist(), pytest.approx(pooling)]
    apart = found.kept.diff()
    assert (apart > 0).all()
    assert (apart <= 0.08 * found.kept[:-1] + 2 / order.key_blocks).all(), "8 % or a whole step"
    assert [Candidates.of(order, CPU, shared).orders for shared in (False, True)] == [
        order.order_kinds, 1,
    ]  # fmt: skip


def test_errors_between_fall_exponentially_and_straight_to_the_end() -> None:
    order = ORDERS["two orders"]
    found, known = Candidates.of(order, CPU), known_shares(order)
    errors, kept = np.array([0.9, 0.7, 0.3, 0.2, 0.05, 0.04, 1e-9]), found.kept.numpy()
    straight, exponential = np.interp(kept, known, errors), np.exp(np.interp(kept, known, np.log(
        errors)))  # fmt: skip
    expected = np.where(kept < known[-2], exponential, straight)
    expected[-1] = 0.0  # rounding leaves errors there
    for name, value in (("errors_between", expected), ("between", straight)):
        of_name = getattr(found, name)(torch.tensor(errors)).numpy()
        np.testing.assert_allclose(of_name, value, rtol=1e-9, atol=1e-12, err_msg=name)


#: Of 7 key blocks 2, 4, 6 or all.
FEW, MANY = Candidates.of(raster_order(7 * 64), CPU), Candidates.of(grid_order(GRID), CPU)
STEP, TINY = 2 / 7, 1e-8  # TINY: above what rounding adds


def sums_of(relative: Tensor, norm: Tensor | None = None, blocks: int = 4) -> Sums:
    """Sums of layers of the relative errors (layers, heads, orders, pool weights, measured
    densities). norm: (layers, heads) of the outputs."""
    sums, shape = Sums(), relative.shape[:3]
    norm = torch.ones(shape[:2]) if norm is None else norm
    square = blocks * norm.double().square()[..., None].expand(shape)
    error = relative.double().square() * square[..., None, None]
    for layer in range(shape[0]):
        none = torch.zeros_like(square[layer])
        sums.add(layer, Measured(error[layer], 0 * error[layer], none, square[layer]), blocks)
    return sums


def drawn(
    generator: torch.Generator, heads: int, layers: int = 1, candidates: Candidates = FEW
) -> Tensor:
    """Errors as of `sums_of`, as falling as they are."""
    shape = layers, heads, candidates.orders, len(POOL_WEIGHTS), len(candidates.measured)
    noise = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.2
    return noise * (torch.linspace(2, 0, shape[-1], dtype=torch.float64).exp() - 1) / 8


def plain(*of_heads: list[float]) -> Tensor:
    """Errors of one layer that plain dropping makes at 2, 4 and 7 of 7 key blocks; pooling makes
    more. At 6 a third of that at 4 is read."""
    at = {1: 0, 2: 0, 4: 1, 7: 2}  # by ranked blocks
    places = [at[max(1, int(density * 7))] for density in FEW.measured]
    errors = torch.tensor(of_heads, dtype=torch.float64)[:, places]
    return torch.stack([errors, *[1.01 * errors] * 5], 1)[None, :, None]


def curves_of(relative: Tensor, norm: Tensor | None = None, candidates: Candidates = FEW) -> Curves:
    return Curves.of(sums_of(relative, norm), candidates)


def settings_of(
    curves: Curves, budget: float | None = None, error: float | None = None
) -> ChosenSettings:
    return curves.settings(curves.chosen([] if budget is None else [budget], error))


def kept_by(curves: Curves, **asked: float) -> list[float]:
    return settings_of(curves, **asked).kept.flatten().tolist()


def summed(of_choices: Tensor, chosen: Tensor) -> Tensor:
    """Sums over heads of values (heads, choices) or (choices,)."""
    heads = torch.arange(chosen.shape[-1])
    return of_choices.expand(len(heads), -1)[heads, chosen].sum(-1)


EVERY = torch.tensor(list(product(range(8), repeat=4)))  # choices of four heads
COSTS, KEPT = FEW.costs().flatten(), FEW.kept.repeat(2)


@pytest.mark.parametrize("attempt", range(3))
def test_a_budget_is_kept_to_and_spent_well(generator: torch.Generator, attempt: int) -> None:
    """Of all choices of four heads none that leaves room for a head's next step errs less."""
    errors = drawn(generator.manual_seed(generator.initial_seed() + attempt), 4)
    errors[..., 1:, :] = 2 * errors[..., :1, :]  # nobody pools: what costs is what is kept
    curves, asked = curves_of(errors), torch.linspace(0.3, 1.0, 30).tolist()
    loss = curves.error.flatten(1) * curves.weight[:, None]
    for budget, chosen in zip(asked, curves.chosen(asked), strict=True):
        reached = float(summed(KEPT, chosen))
        assert reached <= 4 * budget + TINY
        cheaper = summed(KEPT, EVERY) <= 4 * budget - STEP
        if cheaper.any():
            assert summed(loss, chosen) <= summed(loss, EVERY[cheaper]).min() + TINY
        for head, now in enumerate(chosen):
            fits = (KEPT[now] < KEPT) & (reached + KEPT - KEPT[now] <= 4 * budget)
            assert (loss[head, fits] >= loss[head, now]).all(), "no head's step fits any more"


@pytest.mark.parametrize("attempt", range(3))
def test_an_error_is_met_at_the_least_density(generator: torch.Generator, attempt: int) -> None:
    generator.manual_seed(generator.initial_seed() + attempt)
    curves = curves_of(drawn(generator, 4), 0.3 + torch.rand(1, 4, generator=generator))
    whole = (curves.error.flatten(1).square() + ROUNDING**2).sqrt() * curves.weight[:, None]
    of_every, costs, reached = summed(whole, EVERY), summed(COSTS, EVERY), []
    for target in torch.linspace(0.02, 0.5, 25).tolist():
        chosen = curves.chosen(error=target)[0]
        settings = curves.settings(chosen[None])
        assert float((settings.error * settings.weight).mean()) <= target * (1 + 1e-6)
        reached.append(float(summed(COSTS, chosen)))
        # At most a head's step more than the best that errs less by what 8 bits err.
        assert reached[-1] <= costs[of_every <= 4 * (target - ROUNDING)].min() + STEP + 1 / 64
        left = 4 * target - summed(whole, chosen)
        for head, now in enumerate(chosen):
            rise = whole[head] - whole[head, now]
            assert not ((rise > 0) & (rise < left - 1e-6) & (COSTS[now] > COSTS)).any()
    assert max(reached) - min(reached) > 0.5


def test_what_cannot_be_is_come_near(generator: torch.Generator) -> None:
    """A budget below what is always kept, and an error that 8 bits alone pass."""
    curves, few = curves_of(drawn(generator, 3)), pytest.approx([2 / 7] * 3)
    assert kept_by(curves, budget=0.01) == few and kept_by(curves, error=1.0) == few
    for settings in (settings_of(curves, error=0.0), settings_of(curves, budget=1.0)):
        assert settings.kept.flatten().tolist() == [1.0] * 3
        assert settings.error.flatten().tolist() == pytest.approx([ROUNDING] * 3)
        assert not settings.pool_weight.any() and (settings.output_scale == 1).all()


def test_the_better_step_is_the_better_for_its_cost_and_weight() -> None:
    """Room for one step, and ties go to the lower head."""
    steep, flat = [0.5, 0.1, 0.0], [0.5, 0.4, 0.0]
    for of_heads, norm, expected in (
        ((flat, steep, flat, flat), None, [2, 4, 2, 2]),
        ((steep,) * 4, None, [4, 2, 2, 2]),
        ((steep,) * 4, torch.tensor([[1.0, 1.0, 1.0, 4.0]]), [2, 2, 2, 4]),
    ):
        found = kept_by(curves_of(plain(*of_heads), norm), budget=10 / 28)
        assert found == pytest.approx([n / 7 for n in expected])
    assert kept_by(curves_of(plain(steep, steep)), error=0.31) == pytest.approx([4 / 7, 2 / 7])
    rising = curves_of(plain([0.2, 0.3, 0.0])).error[0, 0].tolist()
    assert rising == pytest.approx([0.3, 0.3, 0.1, 0.0]), "no error rises with density"


def test_pooling_has_to_pay_for_itself() -> None:
    """Pooled keys cost a 64th of dense attention, and keep no pairs."""
    errors = plain([0.6, 0.3, 0.0], [0.6, 0.3, 0.0])
    errors[0, 0, 0, 3] = 0.2 * errors[0, 0, 0, 0]  # one head's: by far better
    errors[0, 1, 0, 3] = 0.9999 * errors[0, 1, 0, 0]  # the other's: by a hair
    for asked, kept in (({"budget": 3 / 7}, 4 / 7), ({"error": 0.19}, 6 / 7)):
        found = settings_of(curves_of(errors), **asked)
        assert found.pool_weight.flatten().tolist() == [pytest.approx(POOL_WEIGHTS[3]), 0]
        assert found.kept.flatten().tolist() == pytest.approx([2 / 7, kept])


def test_each_step_has_its_own_budget(generator: torch.Generator) -> None:
    curves = curves_of(drawn(generator, 40, candidates=MANY), candidates=MANY)
    asked = [0.9, 0.6, 0.45, 0.36]
    settings = curves.settings(curves.chosen(asked))
    for step, budget in enumerate(asked):
        kept = float(settings.kept[step].double().mean())
        assert budget - float(MANY.kept.diff().max()) / 40 < kept <= budget + 1e-6
        alone = settings_of(curves, budget=budget)
        for name in SETTINGS[:-1]:
            assert torch.equal(getattr(alone, name)[0], getattr(settings, name)[step]), name


def test_heads_count_by_their_norms_and_layers_by_the_roots_of_theirs() -> None:
    drops = torch.ones(2, 2, 1, len(POOL_WEIGHTS), len(FEW.measured))
    loud = torch.tensor([[1.0, 3.0], [4.0, 12.0]])
    found = curves_of(drops, loud).weight.view(2, 2)
    assert (found[:, 1] / found[:, 0]).tolist() == pytest.approx([3, 3])
    assert [*(found[1] / found[0]).tolist(), float(found.mean())] == pytest.approx([2, 2, 1])
    silent = curves_of(drops, torch.tensor([[0.0, 2.0], [0.0, 0.0]])).weight.tolist()
    assert silent == pytest.approx([LEAST_WEIGHT, 4, LEAST_WEIGHT, LEAST_WEIGHT])
    assert curves_of(drops, torch.zeros(2, 2)).weight.tolist() == [1] * 4
    uneven = sums_of(drops, loud)
    uneven.add(1, Measured(*uneven.of_layers[1]), 4)  # twice the blocks, twice the sums
    assert torch.allclose(Curves.of(uneven, FEW).weight, found.flatten())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("field", range(4))
def test_a_layer_that_is_not_finite_has_no_say(generator, bad: float, field: int) -> None:
    errors = drawn(generator, 3, 3)
    sums = sums_of(errors)
    sums.of_layers[1][field].view(-1)[0] = bad
    curves, alone = Curves.of(sums, FEW), Curves.of(sums_of(errors[[0, 2]]), FEW)
    assert curves.known.tolist() == [True, False, True] and alone.known.all()
    for asked in ({"budget": 0.6}, {"error": 0.1}):
        found, expected = settings_of(curves, **asked), settings_of(alone, **asked)
        for name in SETTINGS:
            pick = (slice(None), [0, 2]) if name != "weight" else ([0, 2],)
            assert torch.equal(getattr(found, name)[pick], getattr(expected, name)), name
    for layer in (0, 2):
        sums.of_layers[layer][field].fill_(bad)
    nothing = Curves.of(sums, FEW)
    assert not nothing.known.any() and settings_of(nothing, budget=0.6).kept.isfinite().all()


@pytest.mark.parametrize(("arch", "scaled"), [("sm_100a", True), ("sm_103a", False)])
def test_output_scales_are_of_kernels_that_know_them(
    arch: str, scaled: bool, generator: torch.Generator, make_qkv, pretend_gpu
) -> None:
    """16-bit operands, which serve 8-bit calls on B300, do not."""
    pretend_gpu(arch)
    order, errors = raster_order(7 * 64), drawn(generator, 2)
    sums = sums_of(errors)
    sums.of_layers[0][2].fill_(1.0)
    curves = Curves.of(sums, Candidates.of(order, CPU))
    settings = curves.settings(curves.chosen([0.6])).of_step(0, SparsePolicy(), 1)(0)
    assert (settings.output_scale is not None) == scaled == bool((curves.scale != 1).any())
    qkv = make_qkv(1, 2, order.tokens)
    attention(*qkv, head_settings=settings)
    given = replace(settings, output_scale=torch.full((2,), 0.5))
    with nullcontext() if scaled else pytest.raises(Unsupported, match="16-bit operands"):
        attention(*qkv, head_settings=given)
    attention(*qkv, SparsePolicy(precision=Precision.INT8_FP16), head_settings=given)


def test_the_same_sums_give_the_same_bits(generator: torch.Generator) -> None:
    """In whatever order layers came, in how many parts, and however often it is asked."""
    sums, parts = (
        sums_of(drawn(generator, 24, 5, MANY), torch.rand(5, 24, generator=generator)),
        Sums(),
    )
    for layer in 2 * [3, 1, 4, 0, 2]:
        parts.add(layer, Measured(*(x / 2 for x in sums.of_layers[layer])), 2)
    for asked in ({"budget": 0.55}, {"error": 0.05}):
        one, *others = (settings_of(Curves.of(x, MANY), **asked) for x in (sums, sums, parts))
        for other in others:
            assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in SETTINGS)


def test_settings_of_a_layer_are_views_that_allocate_nothing(generator: torch.Generator) -> None:
    """Recorded calls read their tables where they lie, whatever is asked for later."""
    curves = curves_of(drawn(generator, 4, 3, MANY), candidates=MANY)
    settings, policy = curves.settings(curves.chosen([0.8, 0.5])), SparsePolicy()
    for orders in (2, 1):
        of_step = settings.of_step(1, policy, orders)
        first = of_step(0).table(policy).data_ptr()
        for layer in (2, 0, 1, 2):
            own = of_step(layer)
            for other in range(20):
                own.table(SparsePolicy(simthreshd1=other / 20))
            assert of_step(layer) is own and own.pools and own.facts == replace(own).facts
            assert torch.equal(own.density, settings.density[1, layer])
            assert set(own.router.tolist()) == {Router.ERROR}
            assert (own.order_kind is None) == (orders == 1)
            table = own.table(policy)
            assert table.data_ptr() == first + layer * table.nbytes
            scales = table[:, COLUMNS.index("output_scale")]
            assert settings.output_scale is not None
            assert torch.equal(scales, settings.output_scale[1, layer])

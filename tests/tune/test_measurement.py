# SPDX-License-Identifier: Apache-2.0
"""Measuring, from measurements to head settings, judged by the attention that those give."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparge.common.metrics import rel_l2
from sparge.common.partial import Partial
from sparge.head_settings import HeadSettings
from sparge.order.grid import TokenGrid, cube_order, grid_order
from sparge.order.variants import OrderKind
from sparge.tune import Measured, MeasuredCall, Workload, reference_measure
from sparge.tune.measure import stacked
from sparge.tune.output_scale import UNSURE
from sparge.tune.scoring import Distances, bucket_distances
from sparge.tune.spread import ROW_STEP
from tests.tune.begun import GRID, attend, begin, share_of_pairs

NO_MEAN = torch.zeros(1)


def sparse_rows(workload: Workload) -> Tensor:
    """Tokens in query blocks that may drop something."""
    block = workload.order.token_slot.long() // 128
    return torch.isin(block, torch.tensor(workload.sparse_query_blocks()))


def test_errors_are_those_of_attention(qkv) -> None:
    measurement = begin()
    workload = measurement.workload
    measurement.add(0, *qkv)
    found, output_scales = (x[0, :, 0] for x in measurement.fetched.errors_and_scales())
    norm, far = measurement.squared_norm[0, :, :, 0]
    spread = (far / norm).sqrt().tolist()
    rows = sparse_rows(workload)
    exact, _ = attend(qkv, HeadSettings.uniform(3, 1.0), workload)
    candidates = measurement.candidates
    for place in np.ndindex(candidates.shape):
        density, pool_weight = place
        head_settings = HeadSettings.uniform(
            3,
            candidates.densities[density],
            candidates.pool_weights[pool_weight],
            candidates.router,
        )
        of_heads = output_scales[(slice(None), *place)]
        head_settings = replace(head_settings, output_scale=torch.from_numpy(of_heads).float())
        out, _ = attend(qkv, head_settings, workload)
        for head in range(3):
            unsure = UNSURE * np.log(output_scales[head][place]) * spread[head]
            expected = np.hypot(rel_l2(out[head, rows], exact[head, rows]), unsure)
            # 0.01: parts round P around their own maxima, to FP16.
            assert found[head][place] == pytest.approx(expected, rel=0.01, abs=1e-3)


def test_a_mean_density_is_kept_and_beats_the_same_for_all(qkv) -> None:
    mean = 0.6
    measurement = begin(layers=2)
    measurement.add(0, *qkv)
    measurement.add(1, *qkv)
    settings = measurement.error_table().choose(mean_density=mean)
    workload = measurement.workload
    exact, _ = attend(qkv, HeadSettings.uniform(3, 1.0), workload)

    def judged(head_settings: HeadSettings) -> tuple[float, float, Tensor]:
        out, kept = attend(qkv, head_settings, workload)
        errors = torch.tensor([rel_l2(a, b) for a, b in zip(out, exact, strict=True)])
        return float(errors.mean()), share_of_pairs(kept, workload), errors

    layers = [
        head_settings for layer in range(2) if (head_settings := settings.head_settings(layer))
    ]
    errors, densities, by_head = zip(
        *(judged(head_settings) for head_settings in layers), strict=True
    )
    assert len(layers) == 2
    assert sum(densities) / 2 <= mean + 1e-6
    assert sum(densities) / 2 > mean - 0.1, "and used"
    shares = torch.linspace(0.05, 1, 20).tolist()
    of_all = [judged(HeadSettings.uniform(3, share)) for share in shares]
    uniform = min(error for error, density, _ in of_all if density <= mean + 1e-6)
    assert sum(errors) / 2 < uniform
    assert torch.allclose(settings.error[0], by_head[0], rtol=0.5, atol=0.01)


def test_keeping_everything_drops_nothing(qkv) -> None:
    """Rounding leaves errors there, which must not decide between token orders."""
    measurement = begin()
    measurement.add(0, *qkv)
    error, _, norm = measurement.fetched.sums
    error.add_(1e-9 * norm[:, 0, ..., None, None])
    error_table = measurement.error_table()
    dropping = error_table.kept < 1
    assert error_table.errors[:, dropping].all() and not error_table.errors[:, ~dropping].any()


def test_a_density_below_what_is_forced_is_said(qkv, caplog: pytest.LogCaptureFixture) -> None:
    measurement = begin()
    measurement.add(0, *qkv)
    settings = measurement.error_table().choose(mean_density=0.1)
    assert settings.density.tolist() == [[pytest.approx(0.2)] * 3]
    assert "A mean density of 0.1 is asked for" in caplog.text
    caplog.clear()
    measurement.error_table().choose(mean_density=0.8)
    assert not caplog.text


def test_layers_without_a_finite_sample_stay_dense(qkv) -> None:
    measurement = begin(layers=3)
    measurement.add(1, *qkv)
    q, k, v = qkv
    measurement.add(2, q, k, v * torch.inf)
    settings = measurement.error_table().choose(mean_density=0.6)
    assert settings.measured.tolist() == [False, True, False]
    assert settings.head_settings(0) is None
    assert settings.head_settings(1) is not None
    assert settings.density[0].tolist() == [1.0] * 3


def test_freeze_wants_one_aim_and_samples(qkv) -> None:
    measurement = begin()
    with pytest.raises(ValueError, match="No layer was measured"):
        measurement.error_table().choose(target=0.1)
    measurement.add(0, *qkv)
    both_and_neither: list[dict[str, Any]] = [{}, {"target": 0.1, "mean_density": 0.2}]
    for aims in both_and_neither:
        with pytest.raises(ValueError, match="one of the two"):
            measurement.error_table().choose(**aims)


def test_samples_add_up(qkv) -> None:
    whole, piecewise = begin(), begin(blocks_a_call=1)
    whole.add(0, *qkv)
    for _ in whole.query_blocks:
        piecewise.add(0, *qkv)
    assert whole.blocks_measured == piecewise.blocks_measured == [len(whole.query_blocks)]
    torch.testing.assert_close(whole.squared_error, piecewise.squared_error)
    torch.testing.assert_close(whole.towards_mean, piecewise.towards_mean)
    torch.testing.assert_close(whole.squared_norm, piecewise.squared_norm)


def test_query_blocks_are_spread_and_the_same_in_every_run() -> None:
    workload = Workload(cube_order(TokenGrid(12, 32, 48, prefix=300)))
    measurement = begin(layers=2, workload=workload, blocks_a_call=4)
    chosen: list[int] = []
    for call in range(8):
        measurement.blocks_measured[0] = 4 * call
        chosen += measurement.next_query_blocks(0)
        assert measurement.next_query_blocks(0) == chosen[-4:]
        assert measurement.next_query_blocks(1) != chosen[-4:]
    sparse = workload.sparse_query_blocks()
    assert 0 not in sparse, "text drops nothing, so there is nothing to measure"
    assert set(chosen) <= set(sparse)
    assert len(set(chosen)) == 32
    assert max(np.diff(sorted(chosen))) <= 2.7 * len(sparse) / 32  # golden: phi^2
    measurement.blocks_measured[0] = 0
    measurement = replace(measurement, blocks_a_call=10**6)
    assert sorted(measurement.next_query_blocks(0)) == sparse


def test_each_head_gets_the_order_that_suits_it(make_qkv) -> None:
    """One head's keys are alike along rows, the other's in cubes, all measured in every order."""
    grid = TokenGrid(8, 16, 16)
    order = grid_order(grid)
    q, k, v = (x.float() for x in make_qkv(1, 2, grid.tokens, 16))
    for head, order_kind in enumerate((OrderKind.ROWS, OrderKind.CUBES)):
        alike = order.of_kind(order_kind).token_slot.long() // 64
        k[0, head] = torch.randn(int(alike.max()) + 1, 16)[alike] * 3
    measurement = begin(heads=2, workload=Workload(order), blocks_a_call=4)
    measurement.add(0, q, k, v)
    assert measurement.blocks_measured == [4]
    settings = measurement.error_table().choose(mean_density=0.4)
    assert settings.order_kind.tolist() == [[OrderKind.ROWS, OrderKind.CUBES]]
    head_settings = settings.head_settings(0)
    assert head_settings is not None
    out, _ = attend((q, k, v), head_settings, Workload(order))
    exact, _ = attend((q, k, v), HeadSettings.uniform(2, 1.0), Workload(order))
    swapped = replace(
        head_settings, order_kind=torch.tensor([OrderKind.CUBES, OrderKind.ROWS], dtype=torch.int32)
    )
    wrong, _ = attend((q, k, v), swapped, Workload(order))
    assert rel_l2(out, exact) < 0.5 * rel_l2(wrong, exact)


def test_heads_that_share_keys_keep_the_first_order(qkv) -> None:
    measurement = begin(workload=Workload(grid_order(GRID)))
    measurement.add(0, *qkv)
    cubes_alone = begin()
    cubes_alone.add(0, *qkv)
    settings, expected = (
        x.error_table().choose(mean_density=0.6) for x in (measurement, cubes_alone)
    )
    assert settings.order_kind.tolist() == [[0, 0, 0]]
    assert torch.equal(settings.density, expected.density)
    assert torch.equal(settings.error, expected.error)


@pytest.mark.parametrize("order_kinds", [range(1), range(1, 2)])
def test_orders_that_are_not_measured_are_not_chosen(make_qkv, order_kinds: range) -> None:
    grid = TokenGrid(8, 16, 16)
    order = grid_order(grid)
    q, k, v = make_qkv(1, 2, grid.tokens, 16)
    for head, order_kind in enumerate((OrderKind.ROWS, OrderKind.CUBES)):
        alike = order.of_kind(order_kind).token_slot.long() // 64
        k[0, head] = torch.randn(int(alike.max()) + 1, 16)[alike] * 3
    by_first = not order_kinds.start
    full, limited = (
        begin(heads=2, workload=Workload(order), blocks_a_call=2, order_kinds=each)
        for each in (None, None if by_first else order_kinds)
    )
    if by_first:
        limited.measure_one_order()
    assert limited.order_kinds == [order_kinds]
    for each in (full, limited):
        each.add(0, q, k, v)
    expected = full.fetched.errors_and_scales()[0][0][:, order_kinds]
    found = limited.fetched.errors_and_scales()[0][0][:, : len(order_kinds)]
    assert np.array_equal(found, expected), "measured as ever"
    assert full.error_table().choose(mean_density=0.4).order_kind.tolist() == [
        [OrderKind.ROWS, OrderKind.CUBES]
    ]
    for settings in (
        limited.error_table().choose(mean_density=0.4),
        limited.error_table().choose(target=0.1),
    ):
        assert set(settings.order_kind.flatten().tolist()) <= set(order_kinds)
        assert settings.error.isfinite().all()
        head_settings = settings.head_settings(0)
        assert head_settings is not None and (head_settings.order_kind is None) == by_first
    with pytest.raises(AssertionError):
        limited.measure_one_order()


def test_some_of_the_rows_tell_about_as_much(make_qkv) -> None:
    whole, some = begin(), begin(row_step=ROW_STEP)
    for _ in range(8):  # of the draws, whose rows differ
        qkv = make_qkv(1, 3, GRID.tokens, 16, kv_heads=1)
        whole.add(0, *qkv)
        some.add(0, *qkv)
    norm = ROW_STEP * some.squared_norm / whole.squared_norm
    torch.testing.assert_close(norm, torch.ones_like(norm), rtol=0.1, atol=0)
    expected = whole.fetched.errors_and_scales()[0][0, :, 0, :-1]
    assert np.abs(some.fetched.errors_and_scales()[0][0, :, 0, :-1] / expected - 1).max() < 0.1


def test_text_alone_is_not_measured() -> None:
    with pytest.raises(ValueError, match="leave this attention dense"):
        begin(workload=Workload(cube_order(TokenGrid(1, 1, 5, prefix=300))))


def test_a_residual_has_to_pay_for_itself(generator: torch.Generator) -> None:
    """Pseudo-keys that all but leave the output alone bring a hair less error, and cost time."""

    def measure(sample: MeasuredCall) -> Measured:
        blocks = sample.query_blocks
        shape, random = (1, 3, len(blocks), 128), torch.randn(16, generator=generator)

        def part(weight: float, value: Tensor) -> Partial:
            sums = torch.full(shape, weight)
            return Partial(sums.unsqueeze(-1) * value, torch.zeros(shape), sums)

        values = (random + 1, random, random)
        parts = [(part(1.0, value), part(1e-4, random)) for value in values]
        found = stacked([bucket_distances(parts, NO_MEAN)])
        return Measured(found, torch.ones(len(blocks), 128).bool())

    measurement = begin(measure=measure)
    q = torch.zeros(1, 3, GRID.tokens, 16)
    measurement.add(0, q, q, q)
    errors = measurement.fetched.errors_and_scales()[0][0, 0, 0]
    assert errors[1, 1] < errors[1, 0]
    settings = measurement.error_table().choose(target=float(errors[1, 0]) * 1.001)
    assert not settings.pool_weight.any()


def test_what_lies_in_empty_slots_does_not_count(qkv) -> None:
    def dirty(sample: MeasuredCall) -> Measured:
        measured = reference_measure(sample)
        empty = ~measured.occupied
        assert empty.any()
        for each in fields(Distances):
            getattr(measured.distances, each.name).masked_fill_(empty, 1e3)
        return measured

    clean, unclean = begin(), begin(measure=dirty)
    clean.add(0, *qkv)
    unclean.add(0, *qkv)
    assert torch.equal(clean.squared_error, unclean.squared_error)
    assert torch.equal(clean.towards_mean, unclean.towards_mean)
    assert torch.equal(clean.squared_norm, unclean.squared_norm)


class NoSync(TorchDispatchMode):
    """Refuses what would wait for a GPU: values read on the host, shapes that depend on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique"), name
        assert name not in ("_unique2", "_to_copy") or "device" not in (kwargs or {}), name
        return func(*args, **(kwargs or {}))


def test_sampling_reads_nothing_and_keeps_nothing(generator: torch.Generator) -> None:
    q = torch.randn(1, 3, GRID.tokens, 16, generator=generator)

    def measure(sample: MeasuredCall) -> Measured:
        """Parts out of thin air: the reference reads values on the host, kernels will not."""
        blocks, candidates = sample.query_blocks, sample.candidates
        shape = (1, 3, len(blocks), 128 // sample.row_step)

        def part() -> Partial:
            sums = torch.rand(shape, generator=generator) + 0.1
            return Partial(torch.rand(*shape, 16, generator=generator), torch.zeros(shape), sums)

        def order_kind() -> Distances:
            parts = [(part(), part()) for _ in candidates.densities]
            return bucket_distances(parts, NO_MEAN)

        found = stacked([order_kind() for _ in sample.order_kinds])
        return Measured(found, torch.ones(shape[2:]).bool())

    measurement = begin(
        workload=Workload(grid_order(GRID)), measure=measure, blocks_a_call=3, row_step=2
    )
    kept = {f.name: getattr(measurement, f.name) for f in fields(measurement)}
    of_pool_weights = (measurement.squared_error, measurement.towards_mean)
    sums = (*of_pool_weights, measurement.squared_norm)
    pointers = [each.data_ptr() for each in sums]
    with NoSync():
        for _ in range(3):
            measurement.add(0, q, q, q)
    assert all(getattr(measurement, name) is value for name, value in kept.items())
    assert pointers == [each.data_ptr() for each in sums]
    assert measurement.blocks_measured == [9]
    assert float(measurement.squared_norm.min()) > 0
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoSync():
        measurement.squared_norm.sum().item()

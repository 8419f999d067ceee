# SPDX-License-Identifier: Apache-2.0
"""Measuring on a CPU beside float64 attention with a weight for each key and each mean key."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparge.head_settings import HeadSettings, Router
from sparge.order.grid import EMPTY, TokenGrid, TokenOrder, grid_order, raster_order
from sparge.policy import SparsePolicy
from sparge.reference import Operands, route
from sparge.session import measure as module
from sparge.session.choose import Curves
from sparge.session.measure import (
    POOL_WEIGHTS,
    ROW_STEP,
    Candidates,
    MeasuredCall,
    Sums,
    compared_rows,
    measure,
    spread_places,
)
from tests.session.parts import measured_call

pytestmark = pytest.mark.usefixtures("one_thread")

#: Orders, heads and KV heads, batch entries, and query blocks, of which some lack queries.
CASES: dict[str, tuple[TokenOrder, int, int, int, tuple[int, ...]]] = {
    "text, two orders": (grid_order(TokenGrid(4, 8, 12, prefix=20)), 2, 2, 1, (1, 2, 3)),
    "text last, GQA, a batch": (
        grid_order(TokenGrid(4, 9, 10, suffix=70)).of_kind(0),
        4,
        2,
        2,
        (2, 0),
    ),
    "no grid": (raster_order(450), 2, 1, 1, (3, 1)),
}


@pytest.fixture(params=CASES)
def call(request: pytest.FixtureRequest, make_qkv) -> MeasuredCall:
    """Neighbouring keys are alike; some heads are flat and others peaked."""
    order, heads, kv_heads, batch, blocks = CASES[request.param]
    q, k, v = make_qkv(batch, heads, order.tokens, 16, kv_heads=kv_heads, dtype=torch.float32)
    k = k + 2 * torch.sin(torch.linspace(0, 60, order.tokens)[:, None] + torch.arange(16)) + 1
    q = q * torch.linspace(0.5, 2, heads)[:, None, None]
    q, k, v = (x.bfloat16().float() for x in (q, k, v + 1))  # as attention reads them
    return measured_call((q, k, v), order, blocks)


def rows_of(call: MeasuredCall, kind: int) -> Tensor:
    """(rows,) tokens that are compared in a token order."""
    of_slots = call.order.slot_tokens[kind].tolist() + [EMPTY] * 64
    return torch.tensor(
        [
            of_slots[128 * block + row]
            for block in call.query_blocks
            for row in compared_rows(torch.arange(128)).tolist()
            if of_slots[128 * block + row] != EMPTY
        ]
    )


def kept_by_route(call: MeasuredCall, kind: int) -> Tensor:
    """(densities, B, H, query blocks, key blocks): blocks that attention keeps."""
    x = Operands.of(call.q, call.k, call.v, call.order.of_kind(kind))
    one = torch.ones(call.q.shape[1])
    return torch.stack(
        [
            route(x, SparsePolicy(),
                  HeadSettings(density * one, one, one.int() * int(Router.ERROR)),
                  scale=call.scale).kept
            for density in call.candidates.measured
        ]
    )  # fmt: skip


def outputs(call: MeasuredCall, kind: int) -> tuple[Tensor, Tensor, Tensor]:
    """y (pool weights, densities, B, H, rows, D) of each candidate, o (B, H, rows, D), and the mean
    value m (B, H, 1, D), all float64."""
    group, tokens = call.q.shape[1] // call.k.shape[1], rows_of(call, kind)
    q = call.q[:, :, tokens].double()
    k, v = (x.double().repeat_interleave(group, 1) for x in (call.k, call.v))
    slots = call.order.token_slots[kind].long()
    blocks = torch.nn.functional.one_hot(slots // 64).double()  # (keys, key blocks)
    counts = blocks.sum(0)
    mean_k, mean_v = (torch.einsum("nj,bhnd->bhjd", blocks / counts, x) for x in (k, v))
    p = (q @ k.mT * call.scale).exp()
    of_means = (q @ mean_k.mT * call.scale).exp() * counts
    kept = kept_by_route(call, kind)[..., slots[tokens] // 128, :].double()
    exact = p * (kept @ blocks.T)  # of each density
    found = []
    for weight in POOL_WEIGHTS:
        pooled = weight * of_means * (1 - kept)
        sums = exact.sum(-1, keepdim=True) + pooled.sum(-1, keepdim=True)
        found.append((exact @ v + pooled @ mean_v) / sums)
    o = p @ v / p.sum(-1, keepdim=True)
    return torch.stack(found), o, v.mean(2, keepdim=True)


def test_sums_are_those_of_attention_in_float64(call: MeasuredCall) -> None:
    found = measure(call, with_truth=True)
    for kind in range(call.candidates.orders):
        y, o, m = outputs(call, kind)
        expected = {
            "error": (y - o).square().sum((2, 4, 5)),
            "towards": ((y - o) * (m - o)).sum((2, 4, 5)),
            "far": (m - o).square().sum((0, 2, 3)),
            "norm": o.square().sum((0, 2, 3)),
        }
        for name, value in expected.items():
            value = value.movedim(2, 0) if value.ndim > 1 else value
            rounding = 1e-5 * float(expected["norm"].max())
            mine = getattr(found, name)[:, kind]
            torch.testing.assert_close(mine, value, rtol=1e-4, atol=rounding, msg=name)
        if kind == 0:
            holds = (call.tokens != EMPTY).flatten()
            assert torch.equal(call.tokens.flatten()[holds], rows_of(call, 0))
            assert found.truth is not None
            truth = found.truth.flatten(2, 3)[:, :, holds]
            torch.testing.assert_close(truth.double(), o, rtol=1e-4, atol=1e-5)
    assert float((found.error[..., 0] / found.norm[..., None]).max()) > 0.01, "something drops"
    assert float(found.error[..., -1].max()) < rounding, "and the last drops nothing"


def test_an_output_scale_gives_what_the_rows_would_have(call: MeasuredCall) -> None:
    """c y + (1 - c) m, with c as far as y is nearer to the mean value than o is."""
    sums = Sums()
    sums.add(0, measure(call), len(call.query_blocks))
    curves = Curves.of(sums, call.candidates)
    chosen = torch.full((1, call.q.shape[1]), len(call.candidates.kept))  # pooled, the least dense
    settings = curves.settings(chosen)
    assert settings.output_scale is not None
    for head in range(call.q.shape[1]):
        scale, weight = (
            float(x[0, 0, head]) for x in (settings.output_scale, settings.pool_weight)
        )
        y, o, m = outputs(call, int(settings.order_kind[0, 0, head]))
        y = y[[round(x, 5) for x in POOL_WEIGHTS].index(round(weight, 5)), 0, :, head]
        o, m = o[:, head], m[:, head]
        assert scale == pytest.approx(float((o - m).norm() / (y - m).norm()), rel=1e-3)
        off = (scale * y + (1 - scale) * m - o).square().sum()
        unsure = (0.4 * torch.tensor(scale).log() * (o - m).norm()).square()
        expected = ((off + unsure) / o.square().sum() + 0.005**2).sqrt()
        assert float(settings.error[0, 0, head]) == pytest.approx(float(expected), rel=1e-3)


def test_groups_of_heads_are_the_whole(call: MeasuredCall, monkeypatch) -> None:
    whole = measure(call, with_truth=True)
    monkeypatch.setattr(module, "BYTES_AT_ONCE", 1)
    grouped = measure(call, with_truth=True)
    for name in ("error", "towards", "far", "norm", "truth"):
        mine, other = getattr(grouped, name), getattr(whole, name)
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-4, msg=name)


def test_blocks_and_entries_add_up_and_what_is_not_finite_comes_from_before(call) -> None:
    whole, parts = Sums(), Sums()
    whole.add(3, measure(call), len(call.query_blocks))
    whole.add(1, measure(call), 4)
    for block in call.query_blocks:
        for entry in range(call.q.shape[0]):
            one = slice(entry, entry + 1)
            qkv = call.q[one], call.k[one], call.v[one]
            part = measured_call(qkv, call.order, [block])
            parts.add(3, measure(part), 1 if entry == 0 else 0)
    for mine, other in zip(parts.of_layers[3], whole.of_layers[3], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert parts.blocks[3] == whole.blocks[3] == len(call.query_blocks)
    both = parts.or_else(whole)
    assert both.of_layers[1] == whole.of_layers[1] and list(parts.of_layers) == [3]
    assert torch.equal(both.of_layers[3][0], parts.of_layers[3][0]) and both.blocks[1] == 4
    parts.of_layers[3][2][0] = torch.nan
    assert torch.equal(parts.or_else(whole).of_layers[3][0], whole.of_layers[3][0])
    assert not Sums()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 331])
def test_visits_are_spread_and_come_to_none_twice(count: int) -> None:
    everything = spread_places(count, 5, 10**6)
    assert sorted(everything) == list(range(count))
    assert spread_places(count, 5, 4) + spread_places(count, 9, 4) == spread_places(
        count, 5, 8
    ) or (count < 8)
    for first in range(3):
        few = sorted(spread_places(count, first, 32))
        gaps = [b - a for a, b in pairwise(few)]
        assert not gaps or max(gaps) <= max(1, 2.7 * count / 32)  # golden: phi^2


def test_a_row_of_every_four_and_all_columns_of_a_cube_alike() -> None:
    rows = compared_rows(torch.arange(128))
    assert torch.equal(rows // ROW_STEP, torch.arange(128 // ROW_STEP))
    assert (rows % 4).bincount(minlength=4).tolist() == [8] * 4
    table = torch.arange(3 * 128).view(3, 128, 1)
    assert torch.equal(compared_rows(table, 1)[..., 0], rows + torch.tensor([[0], [128], [256]]))


class NoWaits(TorchDispatchMode):
    """Refuses what would wait for a GPU: values read on the host, shapes that depend on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique"), name
        return func(*args, **(kwargs or {}))


def test_nothing_waits_from_measuring_to_settings(call: MeasuredCall) -> None:
    sums: Any = Sums()
    with NoWaits():
        for layer in range(2):
            sums.add(layer, measure(call), len(call.query_blocks))
        curves = Curves.of(sums.or_else(sums), call.candidates)
        for chosen in (curves.chosen([0.7, 0.6]), curves.chosen(error=0.1)):
            of_step = curves.settings(chosen).of_step(0, SparsePolicy(), call.candidates.orders)
            assert of_step(1).heads == call.q.shape[1]
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaits():
        sums.of_layers[0][0].sum().item()


def test_candidates_of_a_long_clip_wake_no_threads_of_the_host() -> None:
    """torch shares an operation on a CPU among all cores from so many numbers on, which is slow
    where they are busy."""
    order, largest = grid_order(TokenGrid(28, 30, 53, suffix=256)), 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            sizes = [x.numel() for x in tree_leaves((args, out)) if isinstance(x, Tensor)]
            largest = max(largest, *sizes, 0)
            return out

    with Watch():
        Candidates.of(order, torch.device("cpu"))
    assert 0 < largest < 32_768

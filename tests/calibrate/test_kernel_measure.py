# SPDX-License-Identifier: Apache-2.0
"""What `kernel_measure` does around the kernels, with the reference in their place: on a CPU."""

from __future__ import annotations

import importlib
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge.calibrate import CandidateSet, Measured, Sample, Workload, reference_measure
from sparge.calibrate.scoring import Distances, squared_errors
from sparge.kernels import Element
from sparge.plan import QUERY_BLOCK, Router, TokenGrid, cube_order, unpack
from sparge.reference.packed import Packed, pack_qkv
from sparge.reference.pooled import attend_packed
from sparge.reference.quantize import count_rows, quantize_qkv
from sparge.workspace import CallShape, WorkspaceLayout

# By its name: the package has a function of the same one.
module = importlib.import_module("sparge.calibrate.kernel_measure")

GRID = TokenGrid(4, 8, 15, suffix=20)  # 32 slots of the last query block but the text are empty
CANDIDATES = CandidateSet(densities=(0.1, 0.3, 0.6, 1.0), gains=(0.0, 0.7, 1.0))


class Stages:
    """The ops that `kernel_measure` calls, in the reference's arithmetic."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.packed: list[Packed] = []
        self.attended: list[Tensor] = []

    def quantize(
        self, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None, *_: object
    ) -> Tensor:
        order = self.workload.order
        packed = pack_qkv(q, k, v, order, element=Element.INT8_FP16, key_lengths=key_lengths)
        self.packed.append(packed)
        layout = WorkspaceLayout(
            CallShape.of(q, k, order.slots),
            Element.INT8_FP16,
            with_values=True,
            with_queries=True,
            with_pools=True,
        )
        workspace = torch.zeros(layout.nbytes, dtype=torch.uint8)
        operands = packed.operands
        for name, values in {
            "q_block_mean": operands.q_block_mean,
            "k_block_mean": operands.k_block_mean.transpose(-1, -2),
            "key_counts": operands.key_counts.unsqueeze(1).expand(-1, k.shape[1], -1),
            "k_variance": packed.k_variance.transpose(-1, -2),
            "v_block_mean": packed.v_block_mean.transpose(-1, -2),
            "v_variance": packed.v_variance,
            "v_mean": operands.vbar,
        }.items():  # of the caller's channels; the rest is padding
            layout.view(workspace, name)[tuple(map(slice, values.shape))] = values
        return workspace

    def attend(self, q: Tensor, workspace: Tensor, block_map: Tensor, *rest: Any) -> None:
        _, _, _, _, _, scale, _, _, _, _, _, sums, row_max, row_sum, _ = rest
        (packed,) = self.packed
        own = quantize_qkv(q, q, q, element=Element.INT8_FP16)
        of_queries = ("q_levels", "q_scale", "q_dot_kbar")
        operands = replace(packed.operands, **{name: getattr(own, name) for name in of_queries})
        rows = replace(
            packed, operands=operands, order=None, query_counts=count_rows(q.shape[2], q.device)
        )
        kept = unpack(block_map, packed.operands.key_counts.shape[1])
        found = attend_packed(rows, kept, scale=scale)
        sums.copy_(found.unnormalised)
        row_max.copy_(found.row_max)
        row_sum.copy_(found.row_sum)
        self.attended.append(q)


@pytest.fixture
def sample(make_qkv) -> Sample:
    """Four heads over two KV heads, of 40 channels; text is exact, and the sink not text."""
    workload = Workload(cube_order(GRID), sink=True)
    q, k, v = make_qkv(2, 4, GRID.tokens, 40, kv_heads=2)
    k = k + 2 * torch.sin(torch.linspace(0, 60, GRID.tokens)[:, None] + torch.arange(40))
    blocks = workload.sparse_query_blocks()[-2:]
    return Sample(q, k.bfloat16(), v, blocks, workload, CANDIDATES, 40**-0.5, None)


@pytest.fixture
def stages(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> Stages:
    stages = Stages(sample.workload)
    ops = SimpleNamespace(quantize=stages.quantize, attend=stages.attend)
    monkeypatch.setattr(module, "ops", ops)
    monkeypatch.setattr(module, "element_of", lambda *_: Element.INT8_FP16)
    return stages


def errors(measured: Measured) -> Tensor:
    """(routers, densities, heads, gains) relative."""
    distances, empty = measured.distances, ~measured.occupied
    found = squared_errors(distances, torch.tensor(CANDIDATES.gains).log())
    sums = found.masked_fill(empty.unsqueeze(-1), 0).sum((2, 4, 5))
    return (sums / distances.norm.masked_fill(empty, 0).sum((0, 2, 3))[:, None]).sqrt()


@pytest.mark.parametrize("routers", [tuple(Router), (Router.ERROR,)])
def test_errors_are_those_of_the_reference(
    sample: Sample, stages: Stages, routers: tuple[Router, ...]
) -> None:
    sample = replace(sample, candidates=replace(CANDIDATES, routers=routers))
    found, expected = module.kernel_measure(sample), reference_measure(sample)
    assert torch.equal(found.occupied, expected.occupied)
    assert not found.occupied.all()
    assert len(stages.attended) == 1, "one launch"
    # Pseudo-keys: INT8 there, FP16 here.
    torch.testing.assert_close(errors(found), errors(expected), rtol=5e-3, atol=1e-4)
    for each in fields(Distances):
        here, there = (getattr(x.distances, each.name)[..., x.occupied] for x in (found, expected))
        rounding = 0.01 * float(there[there.isfinite()].abs().mean())
        torch.testing.assert_close(here, there, rtol=0.01, atol=rounding, msg=each.name)
    assert float(errors(found)[:, 0].max()) > 0.1, "the least dense candidates drop something"


def test_slices_of_query_blocks_are_the_whole(
    sample: Sample, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = module.kernel_measure(sample)
    stages.packed.clear()
    monkeypatch.setattr(module, "_SUMS_BYTES", 1)
    sliced = module.kernel_measure(sample)
    assert [rows.shape[2] for rows in stages.attended] == [2 * 8 * QUERY_BLOCK] + 2 * [
        8 * QUERY_BLOCK
    ]
    assert torch.equal(sliced.occupied, whole.occupied)
    for each in fields(Distances):
        torch.testing.assert_close(
            getattr(sliced.distances, each.name), getattr(whole.distances, each.name)
        )

# SPDX-License-Identifier: Apache-2.0
"""Blocks that the route kernel chooses by head settings, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparge import AttentionStats, Router
from sparge.kernels import Element
from sparge.reference import log_scores
from sparge.reference.scores import LEAST_ERROR
from sparge.stages.launch import find_kernel
from sparge.stages.pipeline import quantize, route
from tests.gpu.conftest import Kernels
from tests.gpu.test_head_settings import JOBS, Job, choose, element_for, prepare

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.case.id)
def test_routing(job: Job, generator: torch.Generator, poison: None, force) -> None:
    """The kernel's choice is the reference's, but where scores tie to rounding."""
    element = element_for(Kernels(Element.BF16), job.case)
    force(Kernels(element))
    got = prepare(job, element, generator)
    routed = choose(got)
    differs = got.kept != routed.kept
    if job.case.data == "zeros":
        return  # every score is the same up to rounding
    head_settings = got.call.head_settings
    assert head_settings is not None
    by_mass, by_error = log_scores(got.operands, got.scale, routed.valid)
    takes_error = (head_settings.router == Router.ERROR)[:, None, None]
    scores = torch.where(takes_error, by_error, by_mass)
    least = float(torch.tensor(LEAST_ERROR).log() / 2) + 1
    for row in differs.any(-1).nonzero():
        at = tuple(row.tolist())
        tied = scores[at][differs[at]]
        if job.policy.select_by == "cdf" and len(tied) == 1:
            continue  # the mass of one block may lie on either side of the target
        if (tied < least).all():
            continue  # blocks that pool without any error at all
        assert tied.max() - tied.min() <= 2e-3 * (1 + tied.abs().max()), "not a tie"


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("job", JOBS[::3], ids=lambda job: job.case.id)
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

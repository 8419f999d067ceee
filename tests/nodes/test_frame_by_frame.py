# SPDX-License-Identifier: Apache-2.0
"""Runs of a model whose frames attend one by one, as Wan Animate 2's do."""

from __future__ import annotations

import pytest
import torch

from tests.nodes.parts import EIGHT_BIT, HEADS, TOKENS, network, relative_error

pytestmark = pytest.mark.usefixtures("reference_allowed")

FRAMES, FRAME, TEXT = 4, 8 * 8, 24
CLIP = TOKENS


@pytest.fixture
def run(sampled, generator):
    """run(**widgets): a run of four steps, the first of them dense. The frames of a block attend to
    the clip and, but for the first, to a pose."""
    q = torch.randn(1, CLIP, HEADS * 64, generator=generator)
    kv = torch.randn(1, CLIP + FRAME, HEADS * 64, generator=generator)

    def step(attend):
        out = []
        for _ in range(2):
            for frame, mine in enumerate(q.split(FRAME, 1)):
                keys = kv if frame else kv[:, :CLIP]
                out.append(attend(mine, keys, keys, HEADS))
            attend(q, kv[:, :TEXT], kv[:, :TEXT], HEADS)
        return torch.cat(out, 1)

    def of(**widgets):
        model, text = network("WanAnimate2Model"), torch.zeros(1, TEXT, 8)
        sigmas = [1.0, 0.9, 0.7, 0.5]
        return sampled(step, sigmas, model, context=text, conditionings=([0],), **widgets)

    return of


def test_manual_mode_serves_each_frame(run):
    got = run(topk=1.0)
    assert got.counts.sparse == 2 * 2 * FRAMES and got.counts.cross == 4 * 2
    assert got.counts.reasons == {"before start_percent 0.2": 2 * 2 * FRAMES}
    assert got.line.startswith(f"Wan, {CLIP} tokens")
    assert "the model attends frame by frame" in got.line and "other tokens" not in got.line
    assert relative_error(got.given[-1], got.given[0]) < EIGHT_BIT
    assert torch.equal(got.given[0], got.given[1]), "both are dense"


def test_auto_modes_say_what_it_is(run):
    got = run(mode="auto quality")
    assert got.counts.sparse == 0 and got.counts.cross == 4 * 2
    why = "the model attends frame by frame, which only mode manual serves"
    assert got.counts.reasons == {why: 4 * 2 * FRAMES}
    assert "NOTHING WAS SPARSE" in got.line and "start_percent" not in got.line
    assert all(torch.equal(out, got.given[0]) for out in got.given)

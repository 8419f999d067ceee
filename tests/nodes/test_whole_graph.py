# SPDX-License-Identifier: Apache-2.0
"""torch.compile with fullgraph: dense, with a sentence, instead of an error."""

from __future__ import annotations

import pytest
import torch

from tests.nodes.conftest import backend as dense
from tests.nodes.parts import HEADS, TOKENS

pytestmark = pytest.mark.usefixtures("reference_allowed")


@pytest.fixture
def run(load_pack, sampled, generator, monkeypatch):
    """run(...): a run of three steps, with a model of one call that is compiled or not,
    and the exact result."""
    torch._dynamo.reset()
    monkeypatch.setattr(load_pack("sparge.compiling"), "_traced", set())
    q = torch.randn(1, TOKENS, HEADS * 64, generator=generator)

    def model(x, options):
        override = options["optimized_attention_override"]
        x = x + 1
        return override(dense, x, x, x, HEADS, transformer_options=options) * 2

    def of(**compiling):
        compiled = torch.compile(model, backend="eager", **compiling) if compiling else model

        def step(attend):
            return compiled(q, attend.options)

        first, got = (sampled(step, [0.7, 0.6, 0.5], torch.nn.Module()) for _ in range(2))
        assert all(map(torch.equal, first.given, got.given))
        return got, 2 * dense(q + 1, q + 1, q + 1, HEADS)

    return of


def earlier(func, *args, **kwargs):
    return func(*args, **kwargs) + 1


@pytest.mark.parametrize("under", [False, True], ids=["", "a node under ours is in that graph"])
def test_a_graph_of_the_whole_model_stays_dense_and_says_so(patcher, run, under):
    if under:
        patcher.transformer_options["optimized_attention_override"] = earlier
    got, exact = run(fullgraph=True)
    assert all(torch.equal(out, exact + 2 * under) for out in got.given)
    assert got.counts.calls == 0
    assert "nothing was skipped: torch.compile with fullgraph" in got.line
    assert "turn fullgraph off" in got.line


@pytest.mark.parametrize("compiling", [{}, {"fullgraph": False}, {"dynamic": True}], ids=str)
def test_any_other_graph_leaves_room(run, compiling):
    got, exact = run(**compiling)
    assert got.counts.sparse == 3 and "fullgraph" not in got.line
    assert not any(torch.equal(out, exact) for out in got.given)

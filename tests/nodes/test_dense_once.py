# SPDX-License-Identifier: Apache-2.0
"""Dense attention in calls that are measured."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("reference_allowed")

HEADS, BLOCKS = 2, 2
LATENT = (4, 16, 16)
TOKENS = 4 * 8 * 8


@pytest.fixture
def patch(patched_wan):
    """patch(**widgets): a patched patcher."""
    return lambda **widgets: patched_wan(mode="auto quality", min_tokens=TOKENS, **widgets)


@pytest.fixture
def step(generator):
    """A forward pass: a long self-attention in each block."""
    layers = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)
    return lambda attend: [attend(*layer, HEADS) for layer in layers]


@pytest.fixture
def dense_calls(load_pack, monkeypatch):
    """The results of the dense attention under the node, as a list; set `.error` to raise it."""
    forward = load_pack("nodes.forward").Forward
    attend = forward.attend

    class Results(list):
        error = None

    results = Results()

    def watched(self, call, dense):
        def counted():
            if results.error is not None:
                raise results.error
            results.append(dense())
            return results[-1]

        return attend(self, call, counted)

    monkeypatch.setattr(forward, "attend", watched)
    return results


def test_dense_attention_runs_once(patch, session, step, dense_calls):
    session(patch(), LATENT).sample(step, [1.0, 0.9, 0.7, 0.6, 0.5])
    assert len(dense_calls) == 2 * BLOCKS, "two dense steps, of which the last is measured"


def test_memory_that_dense_attention_lacks_is_not_measuring_s_fault(
    patch, session, step, dense_calls
):
    dense_calls.error = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        session(patch(start_percent=0.0), LATENT).sample(step, [0.5, 0.4])

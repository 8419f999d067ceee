# SPDX-License-Identifier: Apache-2.0
"""Dense attention in calls that are measured: its result is what rounding is measured by."""

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
    forward = load_pack("nodes.forward_facts").Forward
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


def test_dense_attention_runs_once_and_is_compared_with(
    load_pack, patch, session, step, runs, monkeypatch, dense_calls
):
    measurement, compared = load_pack("sparge.tune").Measurement, []
    original = measurement.sample

    def sample(self, layer, q, k, v, *, dense, **kwargs):
        compared.append(dense)
        return original(self, layer, q, k, v, dense=dense, **kwargs)

    monkeypatch.setattr(measurement, "sample", sample)
    session(patch(), LATENT).sample(step, [1.0, 0.9, 0.7, 0.6, 0.5])
    assert len(dense_calls) == 2 * BLOCKS, "two dense steps"
    assert len(compared) == 2 * BLOCKS, "each of a batch of two, in the last of them"
    for out, entries in zip(
        dense_calls[-BLOCKS:], zip(compared[::2], compared[1::2], strict=True), strict=True
    ):
        assert torch.equal(torch.cat(entries).transpose(1, 2).flatten(2), out)
    (table,) = runs[0][0].session.tables.frozen
    rounding = table._steps._measurement.rounding()[:BLOCKS]
    assert 0.002 < float(rounding.min()) <= float(rounding.max()) < 0.03


def test_memory_that_dense_attention_lacks_is_not_measuring_s_fault(
    patch, session, step, dense_calls
):
    dense_calls.error = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        session(patch(start_percent=0.0), LATENT).sample(step, [0.5, 0.4])

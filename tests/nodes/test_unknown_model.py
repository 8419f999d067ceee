# SPDX-License-Identifier: Apache-2.0
"""A model without a row in FAMILIES, or one with other tokens than its clip's, runs sparse, and the
run says what it lacks."""

from __future__ import annotations

import pytest
import torch

from tests.nodes.parts import HEADS, TOKENS, network

pytestmark = pytest.mark.usefixtures("reference_allowed")


@pytest.fixture
def run(sampled, generator):
    """run(model, tokens, **widgets): a run of two calls."""

    def of(model, tokens=TOKENS, **given):
        q = torch.randn(1, tokens, HEADS * 64, generator=generator)
        return sampled(lambda attend: attend(q, q, q, HEADS), [0.7, 0.6], model, **given)

    return of


def test_it_is_told_by_the_name_of_its_class(run):
    got = run(network("Novelty"))
    (note,) = got.notes
    assert got.counts.sparse == 2 and "tokens stay in the order they come" in note
    assert got.line.startswith("Novelty, 256 tokens; ")


@pytest.mark.parametrize("more", [-16, 0, 64])
def test_tokens_that_are_not_the_clips_are_told(load_pack, run, asked, more):
    """Tokens behind the clip leave it on its grid."""
    told = load_pack("sparge.session.calls").UNKNOWN_TOKENS
    got = run(network(), TOKENS + more, min_tokens=0)
    assert (got.counts.sparse, got.notes) == (2, [told] if more < 0 else [])
    orders = {call.order and call.order.tokens for call in asked}
    assert orders == {None if more < 0 else TOKENS + more}


def test_nothing_is_told_of_a_dense_run(run):
    got = run(network("Novelty"), min_tokens=TOKENS + 1)
    assert (got.counts.sparse, got.notes) == (0, [])

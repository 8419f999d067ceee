# SPDX-License-Identifier: Apache-2.0
"""A model without a row in FAMILIES, or one with other tokens than its clip's, runs sparse, and the
run says what it lacks."""

from __future__ import annotations

import pytest
import torch

TOKENS, HEADS = 128, 2  # of the session's latent in Wan's patches


class WanModel(torch.nn.LayerNorm):
    """By name a model with a row; nothing of it runs."""

    patch_size, num_heads, blocks = (1, 2, 2), HEADS, range(3)


class Novelty(torch.nn.LayerNorm):
    blocks = range(3)


@pytest.fixture
def notes_of(load_pack, reference_allowed, patcher, session, generator, runs):
    """notes_of(model, tokens, **widgets): sparse calls, of two, and the remarks of the run."""
    execute = load_pack("nodes.sparge_attention").SpargeAttention.execute

    def run(model, tokens=TOKENS, **widgets):
        q = torch.randn(1, tokens, HEADS * 64, generator=generator)
        patcher.model.diffusion_model = model
        patched = execute(patcher, **({"min_tokens": TOKENS} | widgets))[0]
        session(patched).sample(lambda attend: attend(q, q, q, HEADS), [0.7, 0.6])
        found = runs[-1][0]
        return found.tally.sparse, found.notes

    return run


def test_it_is_told(load_pack, notes_of):
    unknown = load_pack("nodes.families").UNKNOWN_MODEL
    assert notes_of(Novelty(8)) == (2, [unknown])
    assert "text" in unknown and "order" in unknown


def test_tokens_that_are_not_the_clips_are_told(load_pack, notes_of):
    told = load_pack("nodes.families").UNKNOWN_TOKENS
    assert notes_of(WanModel(8), TOKENS + 64) == (2, [told])


def test_nothing_is_told_of_a_known_model_or_a_dense_run(notes_of):
    assert notes_of(WanModel(8)) == (2, [])
    assert notes_of(Novelty(8), min_tokens=TOKENS + 1) == (0, [])

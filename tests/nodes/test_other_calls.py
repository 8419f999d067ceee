# SPDX-License-Identifier: Apache-2.0
"""Calls that are not of a whole clip: of a model without a row in FAMILIES, of tokens beside the
clip, of sound, and of single frames. The run says what it lacks."""

from __future__ import annotations

import pytest
import torch

from tests.nodes.parts import BLOCKS, EIGHT_BIT, HEADS, TOKENS, network, relative_error

SOUND = 100

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


def test_sound_counts_but_is_no_layer_of_the_picture(load_pack, sampled, generator):
    """It attends to itself in the layers of the clip, and is told of as the clip is."""
    clip, sound = (torch.randn(1, n, HEADS * 64, generator=generator) for n in (TOKENS, SOUND))

    def step(attend):
        for _ in range(BLOCKS):
            attend(clip, clip, clip, HEADS)
            attend(clip, sound, sound, HEADS)
            attend(sound, sound, sound, HEADS)

    grid = (4, 8, 8)
    got = sampled(
        step,
        [0.5],
        network("LTXAVModel", num_attention_heads=HEADS, transformer_blocks=range(BLOCKS)),
        grid,
        extras={"latent_shapes": [(1, 4, *grid), (1, 8, SOUND, 16)]},
        topk=0.5,
    )
    found = got.last.densities
    assert (got.counts.sparse, got.counts.dense, got.counts.cross) == (BLOCKS, BLOCKS, BLOCKS)
    assert found.layers.tolist() == list(range(BLOCKS))
    computed = found.of_sparse_calls * TOKENS**2 + SOUND**2
    percent = 100 * computed / (TOKENS**2 + SOUND**2)
    assert f", {percent:.1f} % of attention computed" in got.line
    assert f"{percent:.0f} % of attention computed" in load_pack("sparge.session").verdict(got.last)


#: Of Wan Animate 2, whose frames attend one by one.
FRAMES, FRAME, TEXT = 4, 8 * 8, 24


@pytest.fixture
def by_frame(sampled, generator):
    """by_frame(**widgets): a run of four steps, the first of them dense. The frames of a block
    attend to the clip and, but for the first, to a pose."""
    q = torch.randn(1, TOKENS, HEADS * 64, generator=generator)
    kv = torch.randn(1, TOKENS + FRAME, HEADS * 64, generator=generator)

    def step(attend):
        out = []
        for _ in range(2):
            for frame, mine in enumerate(q.split(FRAME, 1)):
                keys = kv if frame else kv[:, :TOKENS]
                out.append(attend(mine, keys, keys, HEADS))
            attend(q, kv[:, :TEXT], kv[:, :TEXT], HEADS)
        return torch.cat(out, 1)

    def of(**widgets):
        model, text = network("WanAnimate2Model"), torch.zeros(1, TEXT, 8)
        sigmas = [1.0, 0.9, 0.7, 0.5]
        return sampled(step, sigmas, model, context=text, conditionings=([0],), **widgets)

    return of


def test_manual_mode_serves_each_frame(by_frame):
    got = by_frame(topk=1.0)
    assert got.counts.sparse == 2 * 2 * FRAMES and got.counts.cross == 4 * 2
    assert got.line.startswith(f"Wan, {TOKENS} tokens")
    assert "the model attends frame by frame" in got.line and "other tokens" not in got.line
    assert relative_error(got.given[-1], got.given[0]) < EIGHT_BIT


def test_auto_modes_say_what_it_is(by_frame):
    got = by_frame(mode="auto quality")
    why = "the model attends frame by frame, which only mode manual serves"
    assert got.counts.reasons == {why: 4 * 2 * FRAMES} and got.counts.cross == 4 * 2
    assert "nothing was skipped" in got.line and "start_percent" not in got.line

# SPDX-License-Identifier: Apache-2.0
"""Reasons why a call is dense: what it is, the window of steps, and dense_blocks."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module")
def decision(load_pack):
    return load_pack("sparge.session.calls")


@pytest.fixture(scope="module")
def call_of(decision):
    """call_of(queries, keys, **fields) without memory."""

    def made(queries, keys, **fields):
        q, k = (torch.empty(1, 1, tokens, 64, device="meta") for tokens in (queries, keys))
        return decision.Call(q, k, k, **fields)

    return made


@pytest.fixture(scope="module")
def settings(load_pack):
    return load_pack("sparge.session").Settings


@pytest.fixture(scope="module")
def layout_of(load_pack):
    """layout_of(grid, text position's name, **fields) of a model of ten blocks."""
    session = load_pack("sparge.session")

    def made(grid=None, text=None, **fields):
        position = session.TextPosition[text] if text else None
        return session.TokenLayout(family="Test", text=position, grid=grid, blocks=10, **fields)

    return made


@pytest.fixture(scope="module")
def why(decision, call_of, settings, layout_of):
    layout, widgets = layout_of(context=77), settings(min_tokens=1000)

    def reason(tokens=1000, keys=None, **fields):
        call = call_of(tokens, tokens if keys is None else keys, **fields)
        return decision.Decision.of(call, layout, widgets).why_exact

    return reason


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({}, None),
        ({"keys": 77}, "cross-attention"),
        ({"mask": torch.ones(1)}, "attention mask"),
        ({"why_exact": "asked for"}, "asked for"),
        ({"tokens": 999}, "fewer than min_tokens (1000) tokens"),
    ],
    ids=str,
)
def test_all_but_long_self_attention_has_a_reason(why, case, reason):
    assert why(**case) == reason


#: Queries, keys and kind of calls of a clip of 4 frames of 80 tokens, whose model is given 77 of
#: text, 257 of a picture and 30 of sound.
CALLS = {
    "a frame of queries (Animate 2)": (80, 320, "PART"),
    "with the keys of its pose": (80, 400, "PART"),
    "the pose branch": (240, 240, "SELF"),
    "the clip": (320, 320, "SELF"),
    "merged queries (ToMe)": (179, 256, "PART"),
    "queries behind cached keys (HiDream O1)": (256, 300, "PART"),
    "keys of image and text (Stable Cascade)": (576, 653, "PART"),
    "keys of a reference": (320, 640, "PART"),
    "merged keys": (320, 160, "PART"),
    "few merged keys": (64, 16, "PART"),
    "text": (320, 77, "CROSS"),
    "text of a small level of a U-Net": (64, 77, "CROSS"),
    "text that attends to all": (77, 397, "CROSS"),
    "a picture of the prompt": (320, 257, "CROSS"),
    "the clip to sound": (320, 30, "CROSS"),
    "sound to the clip": (30, 320, "CROSS"),
    "sound to text": (30, 77, "CROSS"),
}


@pytest.mark.parametrize("known", [True, False], ids=["with a row", "without"])
@pytest.mark.parametrize("case", CALLS)
def test_what_attends_to_what(decision, call_of, settings, layout_of, case, known):
    """Lengths that nothing else has tell text, pictures and sound; what is left is no
    cross-attention as far as anybody knows."""
    given = {"context": 77, "prompts": frozenset({257})}
    layout = layout_of((4, 8, 10), "NONE", **given) if known else layout_of(**given)
    queries, keys, kind = CALLS[case]
    found = decision.Decision.of(call_of(queries, keys), layout, settings(), beside={30})
    assert found.kind is decision.Kind[kind]


@pytest.mark.parametrize("queries", [80, 320])
def test_sound_as_long_as_the_clip_tells_nothing(decision, call_of, settings, layout_of, queries):
    """The clip attends to itself, in parts or not, in as many tokens."""
    layout, call = layout_of((4, 8, 10), "NONE"), call_of(queries, 320)
    found = decision.Decision.of(call, layout, settings(min_tokens=0), beside={320})
    assert (found.is_of_clip, found.why_exact) == (True, None)

# SPDX-License-Identifier: Apache-2.0
"""Reasons why a call is dense: what it is, the window of steps, and dense_blocks."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def decision(load_pack):
    return load_pack("sparge.session.calls")


@pytest.fixture(scope="module")
def settings(load_pack):
    return load_pack("sparge.session").Settings


@pytest.fixture(scope="module")
def window_of(load_pack):
    return load_pack("sparge.session").SigmaWindow


@pytest.fixture(scope="module")
def layout_of(load_pack):
    """layout_of(grid, text position's name, **fields) of a model of ten blocks."""
    session = load_pack("sparge.session")

    def made(grid=None, text=None, **fields):
        position = session.TextPosition[text] if text else None
        return session.TokenLayout(family="Test", text=position, grid=grid, blocks=10, **fields)

    return made


@pytest.fixture(scope="module")
def why(decision, settings, layout_of):
    layout, widgets = layout_of(context=77), settings(min_tokens=1000)

    def reason(tokens=1000, keys=None, **facts):
        call = decision.CallFacts(tokens, tokens if keys is None else keys, **facts)
        return decision.Decision.of(call, layout, widgets).why_exact

    return reason


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({}, None),
        ({"keys": 77}, "cross-attention"),
        ({"has_mask": True}, "attention mask"),
        ({"refuses_low_precision": True}, "the model asks for full precision here"),
        (
            {"unknown_options": ("is_causal", "bias")},
            "the model uses an option unknown here (is_causal, bias)",
        ),
        ({"tokens": 999}, "fewer than min_tokens (1000) tokens"),
    ],
    ids=str,
)
def test_all_but_long_self_attention_has_a_reason(why, case, reason):
    assert why(**case) == reason


@pytest.mark.parametrize(
    ("keys", "mask", "reason"),
    [
        (320, True, "attention mask"),  # some queries of a masked self-attention: LTXV's guides
        (340, True, "attention mask"),
        (24, True, "cross-attention"),
        (24, False, "cross-attention"),
        (320, False, None),
    ],
)
def test_masked_self_attention_may_come_in_parts(decision, settings, layout_of, keys, mask, reason):
    call = decision.CallFacts(200, keys, has_mask=mask)
    layout = layout_of((4, 8, 10), "NONE", context=24)
    assert decision.Decision.of(call, layout, settings(min_tokens=0)).why_exact == reason


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
def test_what_attends_to_what(decision, settings, layout_of, case, known):
    """Lengths that nothing else has tell text, pictures and sound; what is left is no
    cross-attention as far as anybody knows."""
    given = {"context": 77, "prompts": frozenset({257})}
    layout = layout_of((4, 8, 10), "NONE", **given) if known else layout_of(**given)
    queries, keys, kind = CALLS[case]
    found = decision.Decision.of(decision.CallFacts(queries, keys), layout, settings(), beside={30})
    assert found.kind is decision.Kind[kind]


@pytest.mark.parametrize("queries", [80, 320])
def test_sound_as_long_as_the_clip_tells_nothing(decision, settings, layout_of, queries):
    """The clip attends to itself, in parts or not, in as many tokens."""
    layout, call = layout_of((4, 8, 10), "NONE"), decision.CallFacts(queries, 320)
    found = decision.Decision.of(call, layout, settings(min_tokens=0), beside={320})
    assert (found.is_of_clip, found.why_exact) == (True, None)


@pytest.mark.parametrize("frames", [True, False])
def test_parts_of_a_self_attention_are_for_manual_mode(decision, settings, layout_of, frames):
    layout = layout_of((4, 8, 10), "NONE", frame_by_frame=True) if frames else layout_of()
    call = decision.CallFacts(80 if frames else 180, 320)
    manual, auto = settings(min_tokens=100), settings(min_tokens=100, mode="auto quality")
    why = decision.FRAME_BY_FRAME if frames else decision.DIFFERENT_NUMBERS
    assert decision.Decision.of(call, layout, manual).why_exact is None
    assert decision.Decision.of(call, layout, auto).why_exact == why


def test_text_that_attends_to_itself_stays_exact(decision, settings, layout_of):
    """The token refiner of HunyuanVideo, with min_tokens 0."""
    layout, calls = layout_of((4, 8, 10), "FIRST"), [(n, n) for n in (24, 79, 80, 320, 344)]
    why = [
        decision.Decision.of(decision.CallFacts(*call), layout, settings(min_tokens=0)).why_exact
        for call in calls
    ]
    assert why == ["fewer tokens than a frame has"] * 2 + [None] * 3


@pytest.mark.parametrize(
    ("sigma", "reason"),
    [
        (1.0, "before start_percent 0.2"),
        (0.8, None),
        (0.8 * (1 + 1e-7), None),  # the float32 schedule's last bit
        (0.5, None),
        (0.1, None),
        (0.09, "after end_percent 0.9"),
    ],
)
def test_the_window(window_of, sigma, reason):
    window = window_of(0.8, 0.1, start_percent=0.2, end_percent=0.9)
    assert window.outside_reason(sigma) == reason


def test_the_place_in_the_window_counts_its_steps(load_pack, window_of):
    step, window = load_pack("sparge.session").Step((0,), 7), window_of(start=0.8, end=0.2)
    schedule = [1.0, 0.9, 0.8, 0.7, 0.3, 0.2, 0.1]

    def place(level, schedule=schedule):
        found = window.step(step, level, schedule)
        return found.index, found.of_sparse

    assert [place(level) for level in (0.8, 0.7, 0.3, 0.2)] == [(index, 4) for index in range(4)]
    assert place(0.5) == (2, 4), "between steps: as the next one"
    assert place(0.9) == (0, 4) and place(0.1) == (3, 4)
    for unknown in ([], [1.0, 0.9]):
        assert place(0.5, unknown) == (None, None)


def test_open_edges_hold_whatever_a_model_sampling_calls_its_ends(window_of):
    window = window_of.of(0.0, 1.0, lambda x: 0.5 if x in (0.0, 1.0) else 1 - x)
    assert window.is_everything
    assert window.outside_reason(14.6) is window.outside_reason(0.0) is None


@pytest.fixture(scope="module")
def spans(load_pack):
    return load_pack("sparge.session").LayerSpans


@pytest.mark.parametrize(
    ("text", "total", "listed"),
    [
        ("", 10, []),
        (" , ", 10, []),
        ("0-2, -1", 10, [0, 1, 2, 9]),
        ("3", 10, [3]),
        ("-3--1", 10, [7, 8, 9]),
        ("5--4", 10, [5, 6]),
        ("8-20", 10, [8, 9]),
        ("1, -1", None, [1]),
    ],
)
def test_blocks_that_dense_blocks_lists(spans, text, total, listed):
    parsed = spans.parse(text).of_total(total)
    assert [block for block in range(10) if any(block in span for span in parsed)] == listed


def test_numbers_that_no_block_has(spans):
    parsed = spans.parse("0-2, 9-12, -10, -11--1")
    assert parsed.missing(10) == [-11, 12]
    assert parsed.missing(13) == []
    assert parsed.remark(10) == "dense_blocks names -11, 12; this model has blocks 0-9"
    assert parsed.remark(13) == spans.parse("0-2").remark(None) == ""
    assert parsed.remark(None).startswith("negative dense_blocks do nothing")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("4-2", "ends before it begins: write 2-4"),
        ("1, -1--3", "ends before it begins: write -3--1"),
        *((text, 'for example "0-2, -1"') for text in ("first", "1;2", "0-", "1.5", "0-1-2")),
    ],
)
def test_other_text_is_refused_with_an_example(spans, text, why):
    with pytest.raises(ValueError, match=why):
        spans.parse(text)

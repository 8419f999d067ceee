# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def decision(load_pack):
    return load_pack("nodes.decision")


@pytest.fixture(scope="module")
def tune(load_pack):
    return load_pack("sparge.tune")


@pytest.fixture(scope="module")
def layout_of(load_pack):
    """layout_of(grid, text position's name, **fields) of a model of ten blocks."""
    families, counts = load_pack("nodes.families"), load_pack("nodes.layer_counts").LayerCounts(10)

    def made(grid=None, text=None, **fields):
        position = families.TextPosition[text] if text else None
        return families.TokenLayout(
            family="Test", text=position, grid=grid, counts=counts, **fields
        )

    return made


@pytest.fixture(scope="module")
def why(load_pack, decision, layout_of):
    layout = layout_of()
    settings = load_pack("nodes.settings").Settings(min_tokens=1000, dense_blocks="0, -1")

    def reason(layer=5, run_reason=None, tokens=1000, keys=None, **facts):
        call = decision.CallFacts(tokens, tokens if keys is None else keys, **facts)
        return decision.dense_reason(call, layer, run_reason, layout, settings)

    return reason


def test_plain_long_self_attention_is_sparse(why):
    assert why() is None


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"keys": 77}, "cross-attention"),
        ({"has_mask": True}, "attention mask"),
        ({"refuses_low_precision": True}, "full precision"),
        ({"unknown_options": ("is_causal",)}, "is_causal"),
        ({"tokens": 999}, "fewer than min_tokens (1000)"),
        ({"run_reason": "no GPU"}, "no GPU"),
        ({"layer": 0}, "dense_blocks"),
        ({"layer": 9}, "dense_blocks"),
    ],
    ids=lambda value: str(value),
)
def test_every_other_case_has_a_reason(why, case, reason):
    assert reason in why(**case)


@pytest.mark.parametrize(
    ("keys", "mask", "reason"),
    [
        (320, True, "attention mask"),  # some queries of a masked self-attention: LTXV's guides
        (340, True, "attention mask"),
        (319, True, "cross-attention"),
        (320, False, "cross-attention"),
    ],
)
def test_masked_self_attention_may_come_in_parts(
    load_pack, decision, layout_of, keys, mask, reason
):
    layout = layout_of((4, 8, 10), "NONE")
    settings = load_pack("nodes.settings").Settings(min_tokens=0)
    call = decision.CallFacts(200, keys, has_mask=mask)
    assert decision.dense_reason(call, 0, None, layout, settings) == reason


#: Queries, keys and kind of calls: of Wan Animate 2, whose clip has 4 frames of 80 tokens, and of
#: models without a row that were given 77 tokens of text.
CALLS = {
    "Animate: a frame of queries": (80, 320, "PART"),
    "Animate: with the keys of its pose": (80, 400, "PART"),
    "Animate: text": (320, 24, "CROSS"),
    "Animate: long text": (320, 400, "CROSS"),
    "Animate: text of the poses": (240, 400, "CROSS"),
    "Animate: outside the steps of the poses": (320, 320, "SELF"),
    "Animate: the pose branch": (240, 240, "SELF"),
    "merged queries (ToMe)": (179, 256, "PART"),
    "queries behind cached keys (HiDream O1)": (256, 300, "PART"),
    "keys of image and text (Stable Cascade)": (576, 653, "PART"),
    "text": (256, 77, "CROSS"),
    "text of a small level of a U-Net": (64, 77, "CROSS"),
    "few keys": (64, 99, "CROSS"),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_attends_to_what(load_pack, decision, layout_of, case):
    settings = load_pack("nodes.settings").Settings(min_tokens=100)
    animate = layout_of((4, 8, 10), "NONE", frame_by_frame=True)
    queries, keys, kind = CALLS[case]
    call = decision.CallFacts(queries, keys)
    layout = animate if case.startswith("Animate") else layout_of(context=77)
    assert call.kind(layout, settings) is decision.Kind[kind]
    with_a_row = layout_of((4, 8, 10), "NONE")
    assert call.kind(with_a_row, settings) is not decision.Kind.PART


@pytest.mark.parametrize("frames", [True, False])
def test_parts_of_a_self_attention_are_for_manual_mode(load_pack, decision, layout_of, frames):
    make = load_pack("nodes.settings").Settings
    auto = make(min_tokens=100, mode="auto quality")
    layout = layout_of((4, 8, 10), "NONE", frame_by_frame=True) if frames else layout_of()
    call = decision.CallFacts(80, 320)
    why = [decision.dense_reason(call, 0, None, layout, it) for it in (make(min_tokens=100), auto)]
    assert why == [None, decision.FRAME_BY_FRAME if frames else decision.FEWER_QUERIES]
    assert decision.dense_reason(call, 0, "why", layout, auto) != "why", "lower it in vain"
    assert decision.dense_reason(call, 0, "why", layout, make(min_tokens=100)) == "why"


@pytest.mark.parametrize(
    ("start", "end", "schedule", "steps"),
    [
        (0.8, 0.0, [1.0, 0.9, 0.8, 0.5], 2),
        (0.8, 0.5, [1.0, 0.9, 0.8, 0.5, 0.4, 0.3], 4),
        (0.8, 0.0, [0.7, 0.5], 1),  # the one that is measured
        (float("inf"), 0.4, [1.0, 0.5, 0.3], 2),
        (float("inf"), 0.0, [1.0, 0.5], 1),
        (0.8, 0.0, [], 1),
    ],
)
def test_dense_steps_of_a_schedule(tune, start, end, schedule, steps):
    window = tune.SigmaWindow(start, end)
    assert window.dense_steps(schedule) == steps
    assert window.sparse_steps(schedule) == (max(0, len(schedule) - steps) if schedule else None)


def test_text_that_attends_to_itself_stays_exact(load_pack, decision, layout_of):
    """The token refiner of HunyuanVideo, with min_tokens 0."""
    layout = layout_of((4, 8, 10), "FIRST")
    settings = load_pack("nodes.settings").Settings(min_tokens=0)
    why = [
        decision.dense_reason(decision.CallFacts(tokens, tokens), 0, None, layout, settings)
        for tokens in (24, 79, 80, 320, 344)
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
def test_the_window(tune, sigma, reason):
    window = tune.SigmaWindow(0.8, 0.1, start_percent=0.2, end_percent=0.9)
    assert window.outside_reason(sigma) == reason


def test_the_place_in_the_window_counts_its_steps(tune):
    window = tune.SigmaWindow(start=0.8, end=0.2)
    schedule = [1.0, 0.9, 0.8, 0.7, 0.3, 0.2, 0.1]
    found = [window.place(level, schedule) for level in (0.8, 0.7, 0.3, 0.2)]
    assert found == [tune.Place(index, 4) for index in range(4)]
    assert window.place(0.5, schedule).index == 2, "between steps: as the next one"
    assert window.place(0.9, schedule).index == 0 and window.place(0.1, schedule).index == 3
    for unknown in ([], [1.0, 0.9]):
        assert window.place(0.5, unknown) is None


def test_open_edges_hold_whatever_a_model_sampling_calls_its_ends(tune):
    def to_sigma(percent):
        return 0.5 if percent in (0.0, 1.0) else 1 - percent

    window = tune.SigmaWindow.of(0.0, 1.0, to_sigma)
    assert window.is_everything
    assert window.outside_reason(14.6) is None
    assert window.outside_reason(0.0) is None

# SPDX-License-Identifier: Apache-2.0
"""Words of a run without a sparse call, on the node, in the report and in the picture.

They give the reason that is true, and nothing that sends its user the wrong way.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.usefixtures("reference_allowed")

HEADS, WIDTH = 2, 128
GRID = (4, 8, 8)
LATENT = (4, 16, 16)
TOKENS, TEXT, SOUND = 256, 24, 30
REPLACED = "self-attention did not reach this node; another node replaces it"
AUTO = "auto quality"


class LTXAVModel(torch.nn.LayerNorm):
    """Video and sound, by name; nothing of it runs."""

    num_attention_heads, transformer_blocks = HEADS, range(1)


@pytest.fixture
def told(load_pack, patched_wan, patcher, session, runs):
    """told(step, sigmas, ...): the line, the report's text and the picture's words of a run. step
    is given attend(queries, keys) for calls over so many tokens. model: another than Wan.
    sound: tokens of what is sampled beside the clip."""
    hook_of = load_pack("nodes.hook").hook_of
    report, picture = load_pack("nodes.report"), load_pack("nodes.picture")

    def run(
        step, sigmas=(1.0, 0.7, 0.6), error=None, model=None, sound=0, latent=LATENT, **widgets
    ):
        patched = patched_wan(**({"min_tokens": TOKENS} | widgets))
        if model is not None:
            patched.model.diffusion_model = model
        running = session(patched, latent)
        if sound:
            running.extras = {"latent_shapes": [(1, 4, *latent), (1, 8, sound, 16)]}

        def forward(attend):
            def of(queries, keys):
                q, k = (torch.ones(1, n, WIDTH) for n in (queries, keys))
                return attend(q, k, k, HEADS)

            of.options = attend.options
            step(of)

        try:
            running.sample(forward, list(sigmas))
        except KeyboardInterrupt:
            assert error is KeyboardInterrupt
        last = hook_of(patched).last
        words = []
        with pytest.MonkeyPatch.context() as patch:
            write = picture.write

            def noted(image, text, *args):
                words.append(text)
                write(image, text, *args)

            patch.setattr(picture, "write", noted)
            image = picture.draw(last)
        assert image.shape[2] <= 1500
        line = report.summary(last)
        assert report.details(last).startswith(line)
        return SimpleNamespace(
            line=line, picture=" ".join(dict.fromkeys(words)), result=last, tally=runs[-1][0].tally
        )

    return run


def text_alone(attend):
    attend(TOKENS, TEXT)
    attend(TEXT, TEXT)


def sound_and_text(attend):
    attend(TOKENS, TEXT)
    attend(SOUND, SOUND)
    attend(SOUND, TEXT)
    attend(TOKENS, SOUND)
    attend(SOUND, TOKENS)


@pytest.mark.parametrize("mode", ["manual", AUTO])
@pytest.mark.parametrize("min_tokens", [0, TOKENS])
@pytest.mark.parametrize("case", ["wan", "sound"])
def test_another_node_replaces_the_clips_self_attention(told, mode, min_tokens, case):
    if case == "wan":
        got = told(text_alone, mode=mode, min_tokens=min_tokens)
    else:
        got = told(
            sound_and_text, mode=mode, min_tokens=min_tokens, model=LTXAVModel(8), sound=SOUND,
            latent=GRID,
        )  # fmt: skip
    assert "; NOTHING WAS SPARSE: the clip's " + REPLACED in got.line
    assert ", 256 tokens; " in got.line
    assert "min_tokens" not in got.line and "start_percent" not in got.line
    assert "3 dense self-attention calls of text or sound" in got.line
    assert "the clip's self-attention did not reach this node; another node" in got.picture


def test_sound_that_is_longer_than_a_frame_is_not_the_clip(told):
    got = told(
        lambda attend: [attend(100, 100), attend(TOKENS, TEXT), attend(100, TOKENS)],
        model=LTXAVModel(8), sound=100, latent=GRID,
    )  # fmt: skip
    assert REPLACED in got.line


def test_text_of_a_numbered_block_is_no_picture_of_the_clip(told):
    """Models that publish blocks do so for the text in them, too."""

    def step(attend):
        attend.options |= {"block_index": 0, "total_blocks": 2}
        attend(TEXT, TEXT)

    got = told(step)
    assert REPLACED in got.line and REPLACED in got.picture


def test_a_picture_is_no_clip(told):
    got = told(lambda attend: attend(64, TEXT), latent=(1, 16, 16))
    assert "the picture's " + REPLACED in got.line


@pytest.mark.parametrize(
    "step",
    [
        lambda attend: attend(TOKENS, TOKENS),
        lambda attend: attend(TOKENS + TEXT, TOKENS + TEXT),
        lambda attend: [attend(64, TOKENS) for _ in range(4)],  # frame by frame
        lambda attend: [attend(64, 64) for _ in range(4)],
    ],
    ids=["whole", "with text", "a frame looks at all", "frames"],
)
def test_a_clip_that_came_is_not_missed(told, step):
    for sigmas in ([0.9], [1.0, 0.7]):
        got = told(step, sigmas)
        assert REPLACED not in got.line and not got.tally.missing


def test_a_pass_that_a_cache_answers_replaces_nothing(told):
    passes = iter(range(9))
    got = told(lambda attend: next(passes) == 1 and attend(TOKENS, TOKENS), [1.0, 0.95, 0.9])
    assert REPLACED not in got.line


def test_no_call_at_all_is_told_as_ever(told):
    got = told(lambda attend: None)
    assert "NOTHING WAS SPARSE: no attention call reached this node; a node after it" in got.line
    assert "no attention call reached this node" in got.picture


def raising(number, before):
    """A model that fails in a pass, after so many calls of it."""
    passes = iter(range(99))

    def step(attend):
        now = next(passes)
        for _ in range(before if now == number else 2):
            attend(TOKENS, TOKENS)
        if now == number:
            raise KeyboardInterrupt

    return step


@pytest.mark.parametrize("mode", ["manual", AUTO])
@pytest.mark.parametrize(("number", "before"), [(0, 0), (0, 1), (1, 0), (1, 2), (2, 0)])
def test_a_run_that_stops_early_is_not_sent_to_rewire(told, mode, number, before):
    step = raising(number, before)
    got = told(step, [1.0, 0.9, 0.7], KeyboardInterrupt, mode=mode)
    assert "; NOTHING WAS SPARSE: stopped before the first sparse step" in got.line
    assert "reach" not in got.line and "stopped early" not in got.line
    dense = 2 * number + before
    assert (f"{dense} dense self-attention calls" in got.line) == (dense > 0)


def test_a_run_that_stops_later_says_stopped_early(told):
    got = told(raising(2, 0), [1.0, 0.7, 0.6], KeyboardInterrupt)
    assert got.tally.sparse == 2 and got.line.endswith("; stopped early")


def test_a_stop_in_a_run_that_cannot_be_sparse_has_its_reason(told, reference_forbidden):
    got = told(raising(1, 0), [1.0, 0.7], KeyboardInterrupt)
    assert "before the first sparse step" not in got.line and "stopped early" in got.line


@pytest.mark.parametrize("mode", ["manual", AUTO])
@pytest.mark.parametrize(("start", "end"), [(0.9, 0.1), (0.6, 0.59), (1.0, 0.0)])
def test_an_empty_window_is_told(told, load_pack, monkeypatch, mode, start, end):
    """And nothing is measured for it."""
    add, measured = load_pack("sparge.tune").Measurement.add, []
    monkeypatch.setattr(
        load_pack("sparge.tune").Measurement,
        "add",
        lambda *args, **kwargs: measured.append(1) or add(*args, **kwargs),
    )
    got = told(
        lambda attend: attend(TOKENS, TOKENS), [1.0, 0.8, 0.5, 0.2, 0.05], mode=mode,
        start_percent=start, end_percent=end,
    )  # fmt: skip
    assert got.tally.reasons == {
        f"start_percent {start:g} is above end_percent {end:g}, so no step is between them": 5
    }
    assert not measured


@pytest.mark.parametrize(
    ("mode", "sigmas", "start", "hint"),
    [
        (AUTO, [1.0], 0.2, "mode manual, or a profile, with start_percent 0 can make it sparse"),
        (AUTO, [1.0], 0.0, "mode manual, or a profile, with start_percent 0 can make it sparse"),
        ("manual", [1.0], 0.2, "the only step is before start_percent: 0 can make it sparse"),
        (AUTO, [1.0, 0.9], 0.2, None),
        ("manual", [1.0, 0.9], 0.2, None),
        ("manual", [1.0], 0.0, None),
    ],
)
def test_a_run_of_one_step_is_told_what_can_help(told, mode, sigmas, start, hint):
    step = lambda attend: attend(TOKENS, TOKENS)  # noqa: E731
    got = told(step, sigmas, mode=mode, start_percent=start)
    if hint is None:
        assert "can make it sparse" not in got.line
    else:
        assert got.line.endswith(hint) and got.tally.sparse == 0


@pytest.mark.parametrize("null", [None, "None", ""])
def test_null_names_no_block(load_pack, told, null):
    """An API graph may have null: ComfyUI makes text of it."""
    node = load_pack("nodes.sparge_attention").SpargeAttention
    assert node.validate_inputs(null) is True
    got = told(lambda attend: attend(TOKENS, TOKENS), [0.5], dense_blocks=null)
    assert got.tally.sparse == 1
    assert "dense_blocks contains 'Nine'" in str(node.validate_inputs("Nine"))

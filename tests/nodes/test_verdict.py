# SPDX-License-Identifier: Apache-2.0
"""Words of a run without a sparse call, on the node and in the report.

They give the reason that is true, and nothing that sends its user the wrong way.
"""

from __future__ import annotations

import pytest
import torch

from tests.nodes.parts import TOKENS, network

pytestmark = pytest.mark.usefixtures("reference_allowed")

WIDTH, GRID = 128, (4, 8, 8)
TEXT, SOUND = 24, 30
REPLACED = "the self-attention of the video or picture did not come: another node replaces it"
AUTO = "auto quality"
DEFAULT_STEPS = (1.0, 0.7, 0.6)


@pytest.fixture
def told(load_pack, sampled, monkeypatch):
    """told(step, sigmas, ...): a run. step is given attend(queries, keys) for calls over so many
    tokens. sound: tokens of what is sampled beside the clip."""
    # The process remembers a graph that another test had traced whole.
    monkeypatch.setattr(load_pack("sparge.compiling"), "_traced", set())

    def run(step, sigmas=DEFAULT_STEPS, sound=0, **given):
        def forward(attend):
            def of(queries, keys):
                q, k = (torch.ones(1, n, WIDTH) for n in (queries, keys))
                return attend(q, k, k, 2)

            of.options = attend.options
            step(of)

        if sound:
            given |= {
                "model": network("LTXAVModel", num_attention_heads=2, transformer_blocks=range(1)),
                "latent": GRID,
                "extras": {"latent_shapes": [(1, 4, *GRID), (1, 8, sound, 16)]},
            }
        given = {"context": torch.zeros(1, TEXT, 8)} | given
        got = sampled(forward, sigmas, **given)
        assert got.details.startswith(got.line)
        return got

    return run


def whole(attend):
    attend(TOKENS, TOKENS)


def text_alone(attend):
    attend(TOKENS, TEXT)
    attend(TEXT, TEXT)


def sound_and_text(attend):
    attend(TOKENS, TEXT)
    attend(SOUND, SOUND)
    attend(SOUND, TEXT)
    attend(TOKENS, SOUND)
    attend(SOUND, TOKENS)


def text_of_a_numbered_block(attend):
    """Models that publish blocks do so for the text in them, too."""
    attend.options |= {"block_index": 0, "total_blocks": 2}
    attend(TEXT, TEXT)


@pytest.mark.parametrize("mode", ["manual", AUTO])
@pytest.mark.parametrize("min_tokens", [0, TOKENS])
@pytest.mark.parametrize(
    ("step", "sound"),
    [
        (text_alone, 0),
        (sound_and_text, SOUND),
        (text_of_a_numbered_block, 0),
    ],
)
def test_another_node_replaces_the_clips_self_attention(told, mode, min_tokens, step, sound):
    got = told(step, sound=sound, mode=mode, min_tokens=min_tokens)
    assert "; nothing was skipped: " + REPLACED in got.line
    assert ", 256 tokens; " in got.line
    assert "min_tokens" not in got.line and "start_percent" not in got.line
    assert "3 other dense self-attention calls" in got.line


def test_sound_as_long_as_the_clip_is_not_taken_for_it(told):
    """Nor the clip for sound: nothing tells them apart but their order."""
    got = told(lambda attend: [attend(TOKENS, TOKENS), attend(TOKENS, TEXT)], sound=TOKENS)
    assert got.counts.sparse == 2 and "reach" not in got.line


def test_a_picture_is_no_clip(told):
    got = told(lambda attend: attend(64, TEXT), latent=(1, 16, 16))
    assert REPLACED in got.line


@pytest.mark.parametrize(
    "step",
    [
        whole,
        lambda attend: attend(TOKENS + TEXT, TOKENS + TEXT),
        lambda attend: [attend(64, TOKENS) for _ in range(4)],  # frame by frame
        lambda attend: [attend(64, 64) for _ in range(4)],
    ],
    ids=["whole", "with text", "a frame looks at all", "frames"],
)
def test_a_clip_that_came_is_not_missed(told, step):
    for sigmas in ([0.9], [1.0, 0.7]):
        got = told(step, sigmas)
        assert REPLACED not in got.line and not got.counts.missing
    passes = iter(range(9))  # a cache answers the others
    got = told(lambda attend: next(passes) == 1 and step(attend), [1.0, 0.95, 0.9])
    assert REPLACED not in got.line


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
    "few merged keys": (64, 16, "FEW"),
    "text": (320, 77, "CROSS"),
    "text of a small level of a U-Net": (64, 77, "CROSS"),
    "text that attends to all": (77, 397, "CROSS"),
    "a picture of the prompt": (320, 257, "CROSS"),
    "the clip to sound": (320, 30, "CROSS"),
    "sound to the clip": (30, 320, "CROSS"),
    "sound to text": (30, 77, "CROSS"),
}


@pytest.mark.parametrize("model", [None, torch.nn.Module()], ids=["with a row", "without"])
@pytest.mark.parametrize("case", CALLS)
def test_what_attends_to_what(told, case, model):
    """Lengths that nothing else has tell text, pictures and sound. Other numbers of queries and
    keys are self-attention that a node changes, as far as anybody knows: mode manual serves it, and
    the others have a reason that is true."""
    queries, keys, kind = CALLS[case]
    extras = {"image": torch.zeros(1, 257, 8), "latent_shapes": [(1, 4, 4, 16, 20), (1, 8, 30, 16)]}
    given = {"model": model, "extras": extras, "context": torch.zeros(1, 77, 8), "min_tokens": 0}

    def step(attend):
        attend(320, 320)
        attend(queries, keys)

    manual, auto = (told(step, mode=mode, **given) for mode in ("manual", AUTO))
    counts, cross = manual.counts, 3 * (kind == "CROSS")
    assert counts.cross == auto.counts.cross == cross
    if kind == "FEW":  # than a frame has, where one is known
        return
    assert counts.sparse == (4 if kind != "CROSS" else 2) and counts.calls == 6
    assert auto.counts.sparse == (4 if kind == "SELF" else 2)
    others = {why: n for why, n in auto.counts.reasons.items() if "start_percent" not in why}
    assert list(others.values()) == ([3] if kind == "PART" else [])
    assert all("differ in number" in why and "mode manual serves" in why for why in others)


def test_for_an_empty_window_nothing_is_measured(told, load_pack, monkeypatch):
    measured = []
    heads = load_pack("sparge.session.heads")
    monkeypatch.setattr(heads, "measure", lambda *args, **kwargs: measured.append(1))
    told(whole, [1.0, 0.8, 0.5, 0.2, 0.05], mode=AUTO, start_percent=0.6, end_percent=0.59)
    assert not measured

# SPDX-License-Identifier: Apache-2.0
"""Families that make images, and MiniMax H3, in real ComfyUI: which calls go sparse, in which order
of tokens, and that text and picture stand where the rows say."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.comfy.expected import EIGHT_BIT, FAST, SPARSE_STEPS, STEPS, WINDOW

TEXT, IMAGE = 24, 18 * 20


@dataclass(frozen=True)
class Case:
    """Expected outcome of a forward pass.

    Attributes:
        shown: the family's name for the user.
        calls: segments of the token order of each self-attention call.
        text, picture: first and last token of each in the longest of them; None where none is.
        short: reasons for which calls of text alone are dense, and how many of them a pass.
    """

    shown: str
    calls: list[list[int]]
    picture: tuple[int, int]
    text: tuple[int, int] | None = (0, TEXT - 1)
    short: dict[str, int] = field(default_factory=dict)


_BEHIND_TEXT = (TEXT, TEXT + IMAGE - 1)

CASES = {
    "qwen image": Case("Qwen Image", 2 * [[TEXT, IMAGE]], _BEHIND_TEXT),
    "qwen image edit": Case("Qwen Image", 2 * [[TEXT, 2 * IMAGE, 10 * 12]], _BEHIND_TEXT),
}

_SHORT = "fewer than min_tokens (100) tokens"
#: Refiners of text and picture, then two layers of both. Z-Image fills up to whole 32 tokens.
_Z_TEXT, _Z_FILLED, _Z_IMAGE = 32, 24, 16 * 20
#: Both prompts filled up, and what a vision model saw of the image to edit and of the picture.
_Z_EDIT = 64 + 32 + 2 * 32
CASES |= {
    "lumina": Case(
        "Z-Image or Lumina",
        [[IMAGE], *2 * [[TEXT, IMAGE]]],
        _BEHIND_TEXT,
        short={_SHORT: 1},
    ),
    "z-image": Case(
        "Z-Image or Lumina",
        [[IMAGE, _Z_FILLED], *2 * [[_Z_TEXT, IMAGE, _Z_FILLED]]],
        (_Z_TEXT, _Z_TEXT + IMAGE + _Z_FILLED - 1),
        (0, _Z_TEXT - 1),
        {_SHORT: 1},
    ),
    "z-image edit": Case(
        "Z-Image or Lumina",
        [2 * [_Z_IMAGE], *2 * [[_Z_EDIT, _Z_IMAGE, _Z_IMAGE]]],
        (_Z_EDIT, _Z_EDIT + 2 * _Z_IMAGE - 1),
        (0, 64 + 32 - 1),
        {_SHORT: 2},
    ),
}
#: Tiny models in which half of the blocks is less than what always stays.
_TOO_MUCH_IS_EXACT = {"flux 2", "z-image edit"}
_ALONE = 4 * 8 * 10
CASES |= {
    "sd35 large": Case("SD3", 3 * [[TEXT, IMAGE]], _BEHIND_TEXT),
    "sd35 medium": Case("SD3", [*2 * [[TEXT, IMAGE], [IMAGE]], [TEXT, IMAGE]], _BEHIND_TEXT),
    "cosmos": Case("Cosmos", 2 * [[_ALONE]], (0, _ALONE - 1), None),
    "cosmos predict2": Case("Cosmos Predict2", 2 * [[_ALONE]], (0, _ALONE - 1), None),
    "anima": Case("Anima", 2 * [[IMAGE]], (0, IMAGE - 1), None),
    "krea 2": Case("Krea 2", 2 * [[TEXT, IMAGE]], _BEHIND_TEXT, short={_SHORT: 4}),
    # text of T5, then twice that of Llama
    "hidream": Case(
        "HiDream", 2 * [[IMAGE, TEXT + 2 * 20]], (0, IMAGE - 1), (IMAGE, IMAGE + TEXT - 1)
    ),
    "hidream edit": Case(  # the image to edit is on the right of the picture
        "HiDream",
        2 * [[2 * IMAGE, TEXT + 2 * 20]],
        (0, 2 * IMAGE - 20 - 1),
        (2 * IMAGE, 2 * IMAGE + TEXT - 1),
    ),
    # 10 frames of sound in two channels, between text and clip
    "minimax h3": Case("MiniMax H3", 2 * [[TEXT + 20, _ALONE]], (TEXT, TEXT + 20 + _ALONE - 1)),
}
#: Refiners of text, of the picture and of the image to edit, then layers of all three.
_REFINED = [[IMAGE], [IMAGE]]
#: The image to edit before the picture: its keys are never dropped.
_EDIT_FIRST = [TEXT, IMAGE, IMAGE]
_BEHIND_EDIT = (TEXT + IMAGE, TEXT + 2 * IMAGE - 1)
CASES |= {
    # a vision model, then two encoders of text, of which the prompt's own is the last
    "hunyuan 1.5": Case(
        "HunyuanVideo", 3 * [[5 + 7 + TEXT, _ALONE]], (36, 36 + _ALONE - 1), (12, 35), {_SHORT: 2}
    ),
    # ComfyUI fills up prompts of Flux 2 to 512 tokens, in front
    "flux 2": Case("Flux", 3 * [[512, IMAGE]], (512, 512 + IMAGE - 1), (512 - TEXT, 511)),
    "omnigen 2": Case("OmniGen2", [*_REFINED, *2 * [_EDIT_FIRST]], _BEHIND_EDIT, short={_SHORT: 1}),
    "boogu": Case(
        "Boogu",
        [*_REFINED, _EDIT_FIRST, [IMAGE, IMAGE], _EDIT_FIRST],
        _BEHIND_EDIT,
        short={_SHORT: 1},
    ),
    "mage flow": Case("MageFlow", 2 * [[TEXT, 2 * IMAGE, 10 * 12]], _BEHIND_TEXT),
    # two blocks of patches, then two of pixels, which attend without text
    "pixel dit": Case("PixelDiT", [*2 * [[TEXT, IMAGE]], *2 * [[IMAGE]]], _BEHIND_TEXT),
    "lens": Case("Lens", 2 * [[IMAGE, TEXT]], (0, IMAGE - 1), (IMAGE, IMAGE + TEXT - 1)),
    "joy image": Case(
        "JoyImage",
        2 * [[2 * IMAGE, 10 * 12, TEXT]],
        (0, IMAGE - 1),
        (2 * IMAGE + 120, 2 * IMAGE + 120 + TEXT - 1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_and_their_order(comfyui, name):
    case = CASES[name]
    everything, half, auto = comfyui.sampled(name, {"topk": 1.0}, {"topk": 0.5}, FAST)
    for got in (everything, half, auto):
        passes = got["passes"] // STEPS
        assert [call["segments"] for call in got["calls"]] == SPARSE_STEPS * passes * case.calls
        assert got["sparse"] == len(got["calls"])
        short = {reason: passes * STEPS * calls for reason, calls in case.short.items()}
        assert got["reasons"] == {WINDOW: passes * len(case.calls)} | short
        assert got["text"].startswith(f"{case.shown}, ")
        assert "in the order they come" not in got["text"]
    assert all(call["measured"] for call in auto["calls"])
    assert everything["error"] < max(EIGHT_BIT, 0.2 * half["error"]) and auto["error"] < 0.1
    if name not in _TOO_MUCH_IS_EXACT:
        assert half["error"] > 2 * everything["error"]


@pytest.mark.parametrize("name", CASES)
def test_text_and_picture_stand_where_the_row_says(comfyui, name):
    """Another prompt changes the text's keys in the first layer, another seed the picture's."""
    case = CASES[name]
    found = comfyui.run("places", name=name)
    assert found["picture"] == list(case.picture)
    assert found["text"] == (list(case.text) if case.text else None)
    assert found["tokens"] == max(map(sum, case.calls))


@pytest.mark.parametrize(("name", "segments"), [("qwen image", [15, IMAGE]), ("lens", [IMAGE, 15])])
def test_a_padded_prompt(comfyui, name, segments):
    """Both mask the padding of a prompt in every self-attention, Lens even where there is none. The
    real tokens attend sparsely among themselves. ComfyUI does not batch such masks."""
    widgets = {"topk": 1.0}, {"topk": 0.5}
    everything, half = comfyui.sampled(f"{name}, padded", *widgets, cfg=1.0)
    for got in (everything, half):
        assert [call["segments"] for call in got["calls"]] == SPARSE_STEPS * 2 * [segments]
        assert got["reasons"] == {WINDOW: 2}
        assert "in the order they come" not in got["text"]
    assert everything["error"] < EIGHT_BIT < 2 * half["error"]

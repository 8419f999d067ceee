# SPDX-License-Identifier: Apache-2.0
"""Every family in real ComfyUI, and other models: which calls go sparse, in which order of tokens,
and that text and picture stand where the rows say.

Weights are random: what counts is that heads are measured and sparse, not how sparse.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.comfy.expected import EIGHT_BIT, FAST, SPARSE_STEPS, STEPS, WINDOW

TEXT, IMAGE = 24, 18 * 20
FRAME, CLIP = 8 * 10, 4 * 8 * 10
SHORT = "fewer than min_tokens (100) tokens"


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


def wan(calls: list[list[int]], picture: tuple[int, int] = (0, CLIP - 1)) -> Case:
    return Case("Wan", calls, picture, None)


CASES = {
    "cogvideox": Case("CogVideoX", 2 * [[TEXT, CLIP]], (TEXT, TEXT + CLIP - 1)),
    # 5 frames in pairs, the last one padded
    "cogvideox15": Case("CogVideoX", 2 * [[TEXT, 3 * FRAME]], (TEXT, TEXT + 3 * FRAME - 1)),
    "hunyuan": Case("HunyuanVideo", 3 * [[TEXT, CLIP]], (TEXT, TEXT + CLIP - 1), short={SHORT: 2}),
    "ltxv": Case("LTXV", 2 * [[CLIP]], (0, CLIP - 1), None),
    "ltxav": Case("LTXV", 2 * [[CLIP]], (0, CLIP - 1), None, {SHORT: 2}),
    "kandinsky": Case("Kandinsky 5", 2 * [[CLIP]], (0, CLIP - 1), None, {SHORT: 1}),
    "flux": Case("Flux", 3 * [[TEXT, IMAGE]], (TEXT, TEXT + IMAGE - 1)),
    "wan": wan(2 * [[CLIP]]),
    # its control has a call in each block, for each of two clips
    "vace": wan(2 * 3 * [[CLIP]]),
    "s2v": wan(2 * [[CLIP + FRAME, FRAME + 4 * 5 + 4 * 2 * 2]]),
    "s2v, a smaller reference": wan(2 * [[CLIP, 4 * 6]]),
    "scail": wan(2 * [[FRAME, CLIP, 4 * 4 * 5]], (FRAME, FRAME + CLIP - 1)),
    "humo": wan(2 * [[CLIP + FRAME]]),
    "bernini": wan(2 * [[CLIP + 2 * FRAME, 4 * 6]]),
}

_BEHIND_TEXT = (TEXT, TEXT + IMAGE - 1)

CASES |= {
    "qwen image": Case("Qwen Image", 2 * [[TEXT, IMAGE]], _BEHIND_TEXT),
    "qwen image edit": Case("Qwen Image", 2 * [[TEXT, 2 * IMAGE, 10 * 12]], _BEHIND_TEXT),
}

#: Refiners of text and picture, then two layers of both. Z-Image fills up to whole 32 tokens.
_Z_TEXT, _Z_FILLED, _Z_IMAGE = 32, 24, 16 * 20
#: Both prompts filled up, and what a vision model saw of the image to edit and of the picture.
_Z_EDIT = 64 + 32 + 2 * 32
CASES |= {
    "lumina": Case(
        "Z-Image or Lumina",
        [[IMAGE], *2 * [[TEXT, IMAGE]]],
        _BEHIND_TEXT,
        short={SHORT: 1},
    ),
    "z-image": Case(
        "Z-Image or Lumina",
        [[IMAGE, _Z_FILLED], *2 * [[_Z_TEXT, IMAGE, _Z_FILLED]]],
        (_Z_TEXT, _Z_TEXT + IMAGE + _Z_FILLED - 1),
        (0, _Z_TEXT - 1),
        {SHORT: 1},
    ),
    "z-image edit": Case(
        "Z-Image or Lumina",
        [2 * [_Z_IMAGE], *2 * [[_Z_EDIT, _Z_IMAGE, _Z_IMAGE]]],
        (_Z_EDIT, _Z_EDIT + 2 * _Z_IMAGE - 1),
        (0, 64 + 32 - 1),
        {SHORT: 2},
    ),
}
#: Tiny models in which half of the blocks is less than what always stays.
_TOO_MUCH_IS_EXACT = {"flux 2", "z-image edit"}
CASES |= {
    "sd35 large": Case("SD3", 3 * [[TEXT, IMAGE]], _BEHIND_TEXT),
    "sd35 medium": Case("SD3", [*2 * [[TEXT, IMAGE], [IMAGE]], [TEXT, IMAGE]], _BEHIND_TEXT),
    "cosmos": Case("Cosmos", 2 * [[CLIP]], (0, CLIP - 1), None),
    "cosmos predict2": Case("Cosmos Predict2", 2 * [[CLIP]], (0, CLIP - 1), None),
    "anima": Case("Anima", 2 * [[IMAGE]], (0, IMAGE - 1), None),
    "krea 2": Case("Krea 2", 2 * [[TEXT, IMAGE]], _BEHIND_TEXT, short={SHORT: 4}),
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
    "minimax h3": Case("MiniMax H3", 2 * [[TEXT + 20, CLIP]], (TEXT, TEXT + 20 + CLIP - 1)),
}
#: Refiners of text, of the picture and of the image to edit, then layers of all three.
_REFINED = [[IMAGE], [IMAGE]]
#: The image to edit before the picture: its keys are never dropped.
_EDIT_FIRST = [TEXT, IMAGE, IMAGE]
_BEHIND_EDIT = (TEXT + IMAGE, TEXT + 2 * IMAGE - 1)
CASES |= {
    # a vision model, then two encoders of text, of which the prompt's own is the last
    "hunyuan 1.5": Case(
        "HunyuanVideo", 3 * [[5 + 7 + TEXT, CLIP]], (36, 36 + CLIP - 1), (12, 35), {SHORT: 2}
    ),
    # ComfyUI fills up prompts of Flux 2 to 512 tokens, in front
    "flux 2": Case("Flux", 3 * [[512, IMAGE]], (512, 512 + IMAGE - 1), (512 - TEXT, 511)),
    "omnigen 2": Case("OmniGen2", [*_REFINED, *2 * [_EDIT_FIRST]], _BEHIND_EDIT, short={SHORT: 1}),
    "boogu": Case(
        "Boogu",
        [*_REFINED, _EDIT_FIRST, [IMAGE, IMAGE], _EDIT_FIRST],
        _BEHIND_EDIT,
        short={SHORT: 1},
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
        assert "in the order they come" not in got["text"] and "other tokens" not in got["text"]
    assert all(call["measured"] for call in auto["calls"])
    assert 0 < auto["error_of_heads"] <= 0.1 and auto["error"] < 0.1
    assert f"; error {auto['error_of_heads']:.3f}" in auto["text"]
    assert everything["error"] < max(EIGHT_BIT, 0.2 * half["error"])
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


@pytest.mark.parametrize(
    ("name", "calls", "orders", "dense"),
    [
        ("qwen image, padded", 2, [[15, IMAGE]], {}),
        ("lens, padded", 2, [[IMAGE, 15]], {}),
        # beside the token refiner's two calls of text alone
        ("hunyuan, padded", 3, [[15, CLIP]], {SHORT: 2 * STEPS}),
        # without a mask, in a pass for each prompt
        ("mochi", 2 * 2, [[CLIP, 7], [CLIP, 20]], {}),
    ],
)
def test_a_padded_prompt(comfyui, name, calls, orders, dense):
    """The real tokens attend sparsely among themselves, of Lens even where there is no padding.
    ComfyUI does not batch masks of two prompts."""
    guidance = {"cfg": 1.0} if len(orders) == 1 else {}
    widgets = {"topk": 1.0}, {"topk": 0.5}, FAST
    runs = everything, half, auto = comfyui.sampled(name, *widgets, **guidance)
    for got in runs:
        assert got["sparse"] == SPARSE_STEPS * calls == len(got["calls"])
        assert got["reasons"] == {WINDOW: calls} | dense
        assert sorted({tuple(call["segments"]) for call in got["calls"]}) == [*map(tuple, orders)]
        assert "other tokens" not in got["text"] and "in the order they come" not in got["text"]
    assert everything["error"] < EIGHT_BIT < 2 * half["error"] and auto["error"] < 0.1


@pytest.mark.parametrize(
    ("name", "layers", "exact"),
    [
        ("wan", 2, [0, 0]),
        ("flux", 3, [TEXT, 0]),
        ("cogvideox", 2, [TEXT, 0]),
        ("lens", 2, [0, TEXT]),
    ],
)
def test_text_is_exact_and_dense_blocks_count_from_the_end(comfyui, name, layers, exact):
    listed, untouched = comfyui.sampled(name, {"dense_blocks": "-1"}, None)
    assert all(call["exact"] == exact for call in listed["calls"])
    steps = SPARSE_STEPS * (listed["passes"] // STEPS)
    assert listed["reasons"]["listed in dense_blocks"] == steps
    assert listed["sparse"] == steps * (layers - 1)
    assert untouched["error"] == 0, "the model is as it was"


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_weight_types(comfyui, dtype):
    (got,) = comfyui.sampled("wan", {"topk": 1.0}, dtype=dtype)
    assert got["sparse"] == SPARSE_STEPS * 2
    assert got["error"] < 0.03  # bf16 rounding of the latent itself is 0.01


def test_a_model_without_a_row_is_sparse(comfyui):
    """One dense step is enough to measure it: distilled models have few."""
    auto = {"mode": "auto quality", "quality": "high"}
    everything, measured = comfyui.sampled("unet", {"topk": 1.0}, auto)
    for got in (everything, measured):
        assert got["sparse"] == SPARSE_STEPS * 7 and got["reasons"] == {WINDOW: 7}
    assert {call["tokens"] for call in everything["calls"]} == {24 * 28, 12 * 14}
    assert all(call["measured"] for call in measured["calls"])
    assert everything["error"] < EIGHT_BIT and measured["error"] < 0.1
    said = everything["text"]
    assert said.startswith("UNetModel, 672 tokens; ")
    assert "tokens stay in the order they come" in said


def test_a_model_that_attends_frame_by_frame(comfyui):
    """The calls of its two blocks are those of the clip's four frames, of the pose branch, and of
    text and image in both."""
    *manual, auto = comfyui.sampled("animate2", {"topk": 1.0}, {"topk": 0.5}, FAST)
    for got in manual:
        assert got["sparse"] == SPARSE_STEPS * 2 * (4 + 1) and got["reasons"] == {WINDOW: 2 * 5}
        assert got["cross"] == 2 * 2 * 2 * STEPS and "attends frame by frame" in got["text"]
        assert {call["tokens"] for call in got["calls"]} == {FRAME, 3 * FRAME}
    assert manual[0]["error"] < EIGHT_BIT < 2 * manual[1]["error"]
    why = "the model attends frame by frame, which only mode manual serves"
    assert auto["sparse"] == SPARSE_STEPS * 2 and {x["tokens"] for x in auto["calls"]} == {
        3 * FRAME
    }
    assert auto["reasons"] == {why: STEPS * 2 * 4, WINDOW: 2} and "NaN" not in auto["text"]

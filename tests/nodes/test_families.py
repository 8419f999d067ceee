# SPDX-License-Identifier: Apache-2.0
"""Grid, text and what stands beside them, by family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

VIDEO, IMAGE = (1, 16, 4, 16, 20), (1, 16, 16, 20)
COG = {"patch_size": 2, "patch_size_t": None}
WAN, HUNYUAN, SQUARE = {"patch_size": (1, 2, 2)}, {"patch_size": [1, 2, 2]}, {"patch_size": 2}
COSMOS = {"patch_temporal": 1, "patch_spatial": 2}
Z_IMAGE = SQUARE | {"pad_tokens_multiple": 32}
# class name, its attributes, latent, grid, exact (prefix, suffix) of a sequence 30 tokens longer
CASES = {
    "Mochi 848x480x163": ("AsymmDiTJoint", SQUARE, (28, 60, 106), (28, 30, 53), (0, 30)),
    "CogVideoX 720x480x49": (
        "CogVideoXTransformer3DModel", COG, (13, 60, 90), (13, 30, 45), (30, 0),
    ),
    "Wan 832x480x81": ("WanModel", WAN, (21, 60, 104), (21, 30, 52), (0, 0)),
    "LTXV 1280x720x121": ("LTXBaseModel", {}, (16, 22, 40), (16, 22, 40), (0, 0)),
    "LTXV with sound": ("LTXAVModel", {}, (16, 22, 40), (16, 22, 40), (0, 0)),
    "Kandinsky 5 768x512x121": ("Kandinsky5", WAN, (31, 64, 96), (31, 32, 48), (0, 0)),
    "Qwen Image 1328x1328": (
        "QwenImageTransformer2DModel", SQUARE, (1, 166, 166), (1, 83, 83), (30, 0),
    ),
    "SD3 1024x1024": ("OpenAISignatureMMDITWrapper", SQUARE, (128, 128), (1, 64, 64), (30, 0)),
    "Cosmos 1280x704x121": ("GeneralDIT", COSMOS, (16, 88, 160), (16, 44, 80), (0, 0)),
    "Cosmos Predict2 1024x1024": ("MiniTrainDIT", COSMOS, (1, 128, 128), (1, 64, 64), (0, 0)),
    "Anima 1024x1024": ("Anima", COSMOS, (1, 128, 128), (1, 64, 64), (0, 0)),
    "Krea 2 1024x1024": ("SingleStreamDiT", {"patch": 2}, (1, 128, 128), (1, 64, 64), (30, 0)),
}  # fmt: skip


def latent(*cells):
    return torch.zeros(1, 16, *cells)


FRAME, SMALL = latent(1, 16, 20), latent(2, 8, 9)

# class name, attributes, what it is given beside the latent, (frames, prefix, suffix, lead frames,
# tail)
BESIDE = {
    "Mochi without the padding of its prompt": (
        "AsymmDiTJoint", SQUARE, {"num_tokens": 20}, (4, 0, 20, 0, 0),
    ),
    "Wan": ("WanModel", WAN, {}, (4, 0, 0, 0, 0)),
    "Wan with a reference frame": (
        "WanModel", WAN | {"ref_conv": object()}, {"reference_latent": latent(16, 20)},
        (5, 0, 0, 1, 0),
    ),
    "Wan with a latent of another size in its context, and one of its own": (
        "WanModel", WAN, {"context_latents": [latent(2, 16, 20), SMALL, latent(2, 16, 20)]},
        (6, 0, 0, 0, 2 * 4 * 5 + 2 * 8 * 10),
    ),
    "Wan with a reference of another size, which stays exact": (
        "WanModel", WAN | {"ref_conv": object()}, {"reference_latent": latent(8, 12)},
        (4, 4 * 6, 0, 0, 0),
    ),
    "Wan VACE": (
        "VaceWanModel", WAN, {"vace_context": torch.zeros(1, 2, 96, 4, 16, 20)}, (4, 0, 0, 0, 0),
    ),
    "Wan Camera, which takes no reference": (
        "CameraWanModel", WAN | {"ref_conv": None}, {"context_latents": [latent(2, 16, 20)]},
        (4, 0, 0, 0, 0),
    ),
    "Wan S2V": ("WanModel_S2V", WAN, {"reference_latent": FRAME}, (5, 0, 0, 0, 0)),
    "Wan HuMo": ("HumoWanModel", WAN, {"reference_latent": FRAME}, (5, 0, 0, 0, 0)),
    "Wan SCAIL, with poses of half the size": (
        "SCAILWanModel", WAN,
        {"reference_latent": latent(2, 16, 20), "pose_latents": latent(4, 8, 10)},
        (6, 0, 0, 2, 4 * 4 * 5),
    ),
    "Wan Animate 2": (
        "WanAnimate2Model", WAN, {"pose_latents": latent(3, 16, 20)}, (4, 0, 0, 0, 0),
    ),
    "HunyuanVideo with a reference of another size": (
        "HunyuanVideo", HUNYUAN, {"ref_latent": latent(1, 8, 20)}, (4, 30 + 40, 0, 0, 0),
    ),
    "HunyuanVideo 1.5": (
        "HunyuanVideo", HUNYUAN,
        {"txt_byt5": torch.zeros(1, 7, 8), "clip_fea": torch.zeros(1, 5, 8)}, (4, 42, 0, 0, 0),
    ),
    "Flux edit of another image": (
        "Flux", SQUARE, {"ref_latents": [latent(16, 20), latent(15, 24)]}, (2, 30, 0, 0, 8 * 12),
    ),
    "HiDream, with text of T5 and twice of Llama": (
        "HiDreamImageTransformer2DModel", SQUARE,
        {"encoder_hidden_states_llama3": torch.zeros(1, 32, 12, 8)}, (1, 0, 54, 0, 0),
    ),
    "MiniMax H3": (
        "MiniMaxH3Model", WAN,
        {"minimax_payload": {"layout": SimpleNamespace(
            segments=[(0, 30, "text"), (30, 110, "cond"), (110, 130, "audio"), (130, 450, "video")]
        )}},
        (4, 130, 0, 0, 0),
    ),
    "Krea 2 that is told how to take an image": (
        "SingleStreamDiT", {"patch": 2, "default_ref_method": None},
        {"ref_latents_method": "index", "ref_latents": [FRAME]}, (2, 30, 0, 0, 0),
    ),
    "Z-Image, filled up to whole 32 tokens": (
        "NextDiT", Z_IMAGE, {}, (1, 32, 0, 0, 16),
    ),
    "Z-Image edit with a prompt for the image, which is filled up and so exact": (
        "NextDiT", Z_IMAGE,
        {"ref_latents": [latent(16, 20)], "ref_contexts": [torch.zeros(1, 40, 8)]},
        (1, 32 + 64 + 96, 0, 0, 16),
    ),
    "Lumina with an image to edit, as large": (
        "NextDiT", SQUARE,
        {"ref_latents": [latent(16, 20)], "ref_contexts": [torch.zeros(1, 40, 8)]},
        (2, 70, 0, 1, 0),
    ),
    "OmniGen2 with images to edit, as large": (
        "OmniGen2Transformer2DModel", SQUARE, {"ref_latents": [latent(16, 20)] * 2},
        (3, 30, 0, 2, 0),
    ),
    "Boogu with an image to edit of another size": (
        "BooguTransformer2DModel", SQUARE, {"ref_latents": [latent(15, 12)]}, (1, 78, 0, 0, 0),
    ),
    "MageFlow edit": (
        "MageFlowTransformer2DModel", {"patch_size": 1},
        {"ref_latents": [latent(16, 20), latent(15, 12)]}, (2, 30, 0, 0, 15 * 12),
    ),
    "JoyImage edit": (
        "JoyImageTransformer3DModel", {"patch_size": [1, 2, 2]},
        {"ref_latents": [FRAME, latent(1, 15, 24)]}, (2, 0, 30, 0, 8 * 12),
    ),
    "PixelDiT, which takes no longer prompts": (
        "PixDiT_T2I", SQUARE | {"txt_max_length": 20}, {}, (1, 20, 0, 0, 0),
    ),
    "PiD": ("PidNet", SQUARE | {"txt_max_length": 300}, {}, (1, 30, 0, 0, 0)),
    "Lens": ("LensTransformer2DModel", {}, {}, (1, 0, 30, 0, 0)),
    "Chroma, which takes no image to edit": (
        "Chroma", SQUARE, {"ref_latents": [latent(16, 20)]}, (1, 30, 0, 0, 0),
    ),
}  # fmt: skip


OF_IMAGES = {
    *("Flux", "Chroma", "NextDiT", "SingleStreamDiT"),
    *("OmniGen2Transformer2DModel", "BooguTransformer2DModel", "MageFlowTransformer2DModel"),
    *("LensTransformer2DModel", "PixDiT_T2I", "PidNet"),
    *("JoyImageTransformer3DModel", "HiDreamImageTransformer2DModel"),
    *("OpenAISignatureMMDITWrapper"),
}


@pytest.fixture(scope="module")
def families(load_pack):
    return load_pack("nodes.families")


def model(class_name, *parents, **attributes):
    return type(class_name, parents, attributes)()


@pytest.mark.parametrize("case", CASES)
def test_grid_and_text(families, case):
    class_name, attributes, cells, grid, exact = CASES[case]
    layout = families.token_layout(model(class_name, **attributes), (1, 16, *cells))
    assert layout.grid == grid
    assert layout.exact_tokens(layout.grid_tokens + 30) == exact
    assert layout.exact_tokens(layout.grid_tokens) == (0, 0)
    assert layout.exact_tokens(layout.grid_tokens - 1) == (0, 0)


def test_every_family_has_a_case(families):
    tested = {class_name for class_name, *_ in [*CASES.values(), *BESIDE.values()]}
    assert tested == set(families.FAMILIES)


def test_the_guide_lists_every_model(families):
    """Once, with where its text stands."""
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
    table = guide.split("| model | text among the tokens | |")[1].split("\n\n")[0]
    listed = [line.strip("| ").split(" | ")[:2] for line in table.strip().splitlines()[1:]]
    said = {name: text.rstrip(" |") for name, text in listed}
    known = {family.name: family.text.value for family in families.FAMILIES.values()}
    assert {name: text for name, text in said.items() if text != "not known"} == known
    assert len(listed) == len(said)


@pytest.mark.parametrize("case", BESIDE)
def test_what_stands_beside_the_grid(families, case):
    class_name, attributes, extras, expected = BESIDE[case]
    shape = IMAGE if class_name in OF_IMAGES else VIDEO
    context = torch.zeros(1, 30, 8)
    layout = families.token_layout(model(class_name, **attributes), shape, context, extras)
    tokens = layout.tokens
    found = tokens.frames, tokens.prefix, tokens.suffix, tokens.lead_frames, tokens.tail
    assert found == expected
    assert (tokens.height, tokens.width) == layout.grid[1:]
    assert layout.sequence(tokens.tokens) is tokens
    assert layout.exact_tokens(tokens.tokens) == (tokens.prefix, tokens.suffix)


def test_an_image_to_edit_on_the_right_of_the_picture(families):
    """HiDream's."""
    given = {"image_cond": latent(16, 20), "encoder_hidden_states_llama3": torch.zeros(1, 9, 5, 8)}
    hidream = model("HiDreamImageTransformer2DModel", **SQUARE)
    layout = families.token_layout(hidream, IMAGE, torch.zeros(1, 30, 8), given)
    tokens = layout.tokens
    assert (tokens.height, tokens.width, tokens.suffix, layout.grid) == (8, 20, 40, (1, 8, 10))


def test_a_subclass_and_a_compiled_model_are_recognised(families):
    vace = model("VaceWanModel", type("WanModel", (), WAN), blocks=[0] * 30)
    for found in (vace, SimpleNamespace(_orig_mod=vace)):
        layout = families.token_layout(found, VIDEO)
        assert (layout.family, layout.blocks) == ("Wan", 30)


def test_what_has_no_grid(families):
    layout = families.token_layout(model("Novelty"), VIDEO)
    assert (layout.family, layout.grid, layout.blocks) == ("Novelty", None, None)
    assert layout.exact_tokens(5000) == (0, 0)
    assert families.token_layout(model("LTXBaseModel"), (1, 8, 100)).grid is None, "sound"


def test_a_guide_that_lost_tokens_leaves_the_clip_on_its_grid(families):
    """LTXV's, which are the last frames of the latent."""
    guide = {"keyframe_idxs": torch.zeros(1, 3, 2 * 16 * 20, 2)}
    ltx = families.token_layout(model("LTXBaseModel"), (1, 128, 6, 16, 20), None, guide)
    assert ltx.sequence(6 * 320) is ltx.tokens
    assert ltx.sequence(4 * 320 + 160) == replace(ltx.tokens, frames=4, tail=160)
    assert ltx.sequence(4 * 320 - 1) is None


def test_the_pose_branch_of_animate_2_has_a_grid_of_its_own(families):
    animate = model("WanAnimate2Model", **WAN)
    layout = families.token_layout(animate, VIDEO, None, {"pose_latents": latent(3, 16, 20)})
    (poses,) = layout.branches
    assert (poses.frames, poses.tokens, poses.tail) == (3, 240, 0)
    assert layout.sequence(240) is poses and layout.sequence(320) is layout.tokens
    without = families.token_layout(animate, VIDEO)
    assert without.branches == (), "outside the steps of the poses"


def test_the_refiners_of_omnigen2_have_grids_of_their_own(families):
    """Of the picture alone, and of the images to edit."""
    omnigen = model("OmniGen2Transformer2DModel", **SQUARE)
    given = {"ref_latents": [latent(16, 12), latent(8, 12)]}
    layout = families.token_layout(omnigen, IMAGE, torch.zeros(1, 30, 8), given)
    assert layout.tokens.tokens == 30 + 8 * 6 + 4 * 6 + 80
    picture, images = layout.branches
    assert layout.sequence(80) is picture and (picture.height, picture.width) == (8, 10)
    assert layout.sequence(72) is images
    assert (images.height, images.width, images.tail) == (8, 6, 24)


def test_heads_are_known_before_a_call(families):
    models = {
        40: model("WanModel", num_heads=40, **WAN),
        32: model("LTXBaseModel", num_attention_heads=32),
        48: model("SingleStreamDiT", patch=2, heads=48),
        30: model("NextDiT", n_heads=30, **Z_IMAGE),
        None: model("Novelty"),
    }
    assert [families.token_layout(each, VIDEO).heads for each in models.values()] == [*models]

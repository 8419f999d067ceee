# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

# class name, its attributes, latent, grid, exact (prefix, suffix) of a sequence 30 tokens longer
CASES = {
    "Mochi 848x480x163": ("AsymmDiTJoint", {"patch_size": 2}, (28, 60, 106), (28, 30, 53), (0, 30)),
    "CogVideoX 720x480x49": (
        "CogVideoXTransformer3DModel",
        {"patch_size": 2, "patch_size_t": None},
        (13, 60, 90),
        (13, 30, 45),
        (30, 0),
    ),
    "CogVideoX 1.5, an odd number of frames": (
        "CogVideoXTransformer3DModel",
        {"patch_size": 2, "patch_size_t": 2},
        (21, 96, 170),
        (11, 48, 85),
        (30, 0),
    ),
    "Wan 832x480x81": ("WanModel", {"patch_size": (1, 2, 2)}, (21, 60, 104), (21, 30, 52), (0, 0)),
    "HunyuanVideo 1280x720x129": (
        "HunyuanVideo",
        {"patch_size": [1, 2, 2]},
        (33, 90, 160),
        (33, 45, 80),
        (30, 0),
    ),
    "HunyuanImage": ("HunyuanVideo", {"patch_size": [2, 2]}, (64, 64), (1, 32, 32), (30, 0)),
    "LTXV 1280x720x121": ("LTXBaseModel", {}, (16, 22, 40), (16, 22, 40), (0, 0)),
    "LTXV with sound": ("LTXAVModel", {}, (16, 22, 40), (16, 22, 40), (0, 0)),
    "Kandinsky 5 768x512x121": (
        "Kandinsky5",
        {
            "patch_size": (1, 2, 2),
            "visual_transformer_blocks": [
                SimpleNamespace(self_attention=SimpleNamespace(num_heads=28))
            ],
        },
        (31, 64, 96),
        (31, 32, 48),
        (0, 0),
    ),
    "Flux 1024x1024": ("Flux", {"patch_size": 2}, (128, 128), (1, 64, 64), (30, 0)),
}


@pytest.fixture(scope="module")
def families(load_pack):
    return load_pack("nodes.families")


def model(class_name, **attributes):
    return type(class_name, (), attributes)()


@pytest.mark.parametrize("case", CASES)
def test_grid_and_text(families, case):
    class_name, attributes, cells, grid, exact = CASES[case]
    layout = families.token_layout(model(class_name, **attributes), (1, 16, *cells))
    assert layout.grid == grid
    assert layout.exact_tokens(layout.grid_tokens + 30) == exact
    assert layout.exact_tokens(layout.grid_tokens) == (0, 0)
    assert layout.exact_tokens(layout.grid_tokens - 1) == (0, 0)


def test_every_family_has_a_case(families):
    tested = {class_name for class_name, *_ in CASES.values()}
    assert tested == set(families.FAMILIES) - {"Chroma"}  # Flux's row under another name


def test_reference_images_are_no_text(families):
    layout = families.token_layout(model("Flux", patch_size=2), (1, 16, 128, 128))
    assert layout.exact_tokens(512 + 4096 + 1024, references=1024) == (512, 0)


def test_a_subclass_and_a_compiled_model_are_recognised(families):
    wan = type("WanModel", (), {"patch_size": (1, 2, 2)})
    vace = type("VaceWanModel", (wan,), {"blocks": [0] * 30})()
    for found in (vace, SimpleNamespace(_orig_mod=vace)):
        layout = families.token_layout(found, (1, 16, 21, 60, 104))
        assert (layout.family, layout.blocks) == ("Wan", 30)


def test_an_unknown_model_has_no_grid_and_no_exact_tokens(families):
    layout = families.token_layout(model("Novelty"), (1, 16, 21, 60, 104))
    assert (layout.family, layout.grid, layout.blocks) == ("This model", None, None)
    assert layout.exact_tokens(5000) == (0, 0)


def test_an_audio_latent_has_no_grid(families):
    layout = families.token_layout(model("LTXBaseModel"), (1, 8, 100))
    assert layout.grid is None


# class name, attributes, what it is given beside the latent, (frames, prefix, suffix, lead frames)
BESIDE = {
    "Mochi without the padding of its prompt": (
        ("AsymmDiTJoint", {"patch_size": 2}),
        {"num_tokens": 20},
        (4, 0, 20, 0),
    ),
    "CogVideoX": (
        ("CogVideoXTransformer3DModel", {"patch_size": 2, "patch_size_t": None}),
        {},
        (4, 30, 0, 0),
    ),
    "Wan": (("WanModel", {"patch_size": (1, 2, 2)}), {}, (4, 0, 0, 0)),
    "Wan with a reference frame": (
        ("WanModel", {"patch_size": (1, 2, 2), "ref_conv": object()}),
        {"reference_latent": torch.zeros(1, 16, 16, 20)},
        (5, 0, 0, 1),
    ),
    "Wan that ignores a reference": (
        ("WanModel", {"patch_size": (1, 2, 2), "ref_conv": None}),
        {"reference_latent": torch.zeros(1, 16, 16, 20)},
        (4, 0, 0, 0),
    ),
    "Wan with latents in its context": (
        ("WanModel", {"patch_size": (1, 2, 2)}),
        {
            "context_latents": [torch.zeros(1, 16, 2, 16, 20), torch.zeros(1, 16, 1, 16, 20)],
            "time_dim_concat": torch.zeros(1, 16, 1, 16, 20),
        },
        (8, 0, 0, 0),
    ),
    "HunyuanVideo 1.5": (
        ("HunyuanVideo", {"patch_size": [1, 2, 2]}),
        {"txt_byt5": torch.zeros(1, 7, 8), "clip_fea": torch.zeros(1, 5, 8)},
        (4, 42, 0, 0),
    ),
    "HunyuanVideo with a reference": (
        ("HunyuanVideo", {"patch_size": [1, 2, 2]}),
        {"ref_latent": torch.zeros(1, 16, 1, 16, 20)},
        (5, 30, 0, 1),
    ),
    "LTXV": (("LTXBaseModel", {}), {}, (4, 0, 0, 0)),
    "Flux edit of an image of the same size": (
        ("Flux", {"patch_size": 2}),
        {"ref_latents": [torch.zeros(1, 16, 16, 20)] * 2},
        (3, 30, 0, 0),
    ),
    "Flux edit of another image": (
        ("Flux", {"patch_size": 2}),
        {"ref_latents": [torch.zeros(1, 16, 16, 24)]},
        None,
    ),
}


@pytest.mark.parametrize("case", BESIDE)
def test_what_stands_beside_the_grid(families, case):
    (class_name, attributes), extras, expected = BESIDE[case]
    shape = (1, 16, 16, 20) if class_name == "Flux" else (1, 16, 4, 16, 20)
    context = torch.zeros(1, 30, 8)
    layout = families.token_layout(model(class_name, **attributes), shape, context, extras)
    if expected is None:
        assert layout.tokens is None
        return
    tokens = layout.tokens
    assert (tokens.frames, tokens.prefix, tokens.suffix, tokens.lead_frames) == expected
    assert (tokens.height, tokens.width) == layout.grid[1:]


def test_heads_are_known_before_a_call(families):
    latent = (1, 16, 4, 16, 20)
    wan = model("WanModel", patch_size=(1, 2, 2), num_heads=40)
    ltx = model("LTXBaseModel", num_attention_heads=32)
    found = [families.token_layout(each, latent).heads for each in (wan, ltx, model("Novelty"))]
    assert found == [40, 32, None]

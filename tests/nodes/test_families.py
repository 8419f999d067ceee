# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace

import pytest

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
    assert (layout.family, layout.grid, layout.blocks) == ("Novelty", None, None)
    assert layout.exact_tokens(5000) == (0, 0)


def test_an_audio_latent_has_no_grid(families):
    layout = families.token_layout(model("LTXBaseModel"), (1, 8, 100))
    assert layout.grid is None


def test_block_numbers(families):
    flux = model("Flux", patch_size=2, double_blocks=[0] * 19, single_blocks=[0] * 38)
    layout = families.token_layout(flux, (1, 16, 128, 128))
    published = {"block_index": 3, "total_blocks": 38}
    assert layout.blocks == 57
    assert layout.block_index(published | {"block_type": "double"}, 0) == 3
    assert layout.block_index(published | {"block_type": "single"}, 0) == 22
    assert layout.block_index({}, 7) == 7
    assert layout.block_index({"block_index": 0}, 7) == 7  # a U-Net's, which is another thing

# SPDX-License-Identifier: Apache-2.0
"""CogVideoX from its published files in real ComfyUI, beside a file under ComfyUI's names in
ComfyUI's own loader."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cogvideox_files import (
    PUBLISHED,
    ROTARY,
    SINCOS,
    mark,
    published,
    shapes_of,
    write_empty,
    write_model,
)

#: Of each model: its config.json, the type of its weights, and sizes.
SIZES: dict[str, tuple[dict[str, Any], torch.dtype, dict[str, Any]]] = {
    "5b": (ROTARY, torch.float32, {}),
    "2b": (SINCOS, torch.float16, {"heads": 3}),
    "1.5": (ROTARY, torch.bfloat16, {"patch": (128,), "out": 128}),
    "1.5-i2v": (
        ROTARY, torch.bfloat16, {"patch": (256,), "out": 128, "time": 512, "ofs": 512}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(base_directory: Path) -> Path:
    folder = base_directory / "models" / "diffusion_models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def files(models: Path) -> dict[str, str]:
    """Paths by the model's size: the first of two published files."""
    names, generator = {}, torch.Generator().manual_seed(5)
    for size, (config, dtype, sizes) in SIZES.items():
        state = published(generator, text=64, **sizes)
        tame = {name: (tensor * 0.05).to(dtype) for name, tensor in state.items()}
        folder = write_model(models / f"tiny cog {size}", tame, config)
        first = next((folder / "transformer").glob("*-00001-of-00002.safetensors"))
        names[size] = first.relative_to(models).as_posix()
    return names


@pytest.mark.parametrize(
    ("size", "weight_dtype", "dynamic_vram"),
    [
        ("5b", "default", False),
        ("5b", "default", True),
        ("5b", "fp8_e4m3fn", False),
        ("2b", "default", False),
        ("1.5", "default", False),
        ("1.5-i2v", "default", False),
    ],
)
def test_the_same_model_as_comfyui_loads(comfyui, files, size, weight_dtype, dynamic_vram):
    """Of the model's own state under ComfyUI's names, which has each tensor of the file."""
    first = files[size]
    got = comfyui.run("cogvideox_loaded", published=first, weight_dtype=weight_dtype,
                      dynamic_vram=dynamic_vram)  # fmt: skip
    assert first in got["offered"] and first.replace("00001", "00002") not in got["offered"]
    assert got["dtypes"] == got["core's dtypes"]
    ours, core = got["facts"]
    assert ours == core and ours["model"] == "CogVideoX"
    assert got["weights differ"] == [] and got["finite"] and got["outputs are equal"]
    assert got["tensors"] == len(shapes_of(2, 2, ofs=SIZES[size][2].get("ofs"))) + (size == "2b")


@pytest.mark.skipif(sys.platform != "linux", reason="files of nothing may take room on the disk")
@pytest.mark.parametrize("size", ["5b", "1.5", "1.5-i2v"])
def test_a_model_of_the_published_size_arrives_whole(comfyui, models, size):
    """With DynamicVRAM: every parameter is the file's own, mapped, and none is copied."""
    first = write_empty(models / f"whole {size}", size).relative_to(models).as_posix()
    got = comfyui.run("cogvideox_at_its_size", name=first)
    shapes = shapes_of(**PUBLISHED[size])
    assert got["network"] == "CogVideoX"
    assert sorted(got["shapes"].values()) == sorted(map(list, shapes.values()))
    assert sorted(got["ends"].values()) == sorted([mark(name)] * 2 for name in shapes)
    assert got["taken"] < 200e6, "of eleven billion bytes"

# SPDX-License-Identifier: Apache-2.0
"""CogVideoX from its published files in real ComfyUI, beside the converted file in ComfyUI's own
loader."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparge.cogvideox.layout import core_name
from tests.convert.parts import (
    PUBLISHED,
    ROTARY,
    SINCOS,
    mark,
    published,
    shapes_of,
    write_empty,
    write_model,
)
from tools.convert_cogvideox.convert import main

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
def files(models: Path) -> dict[str, tuple[str, str]]:
    """Paths by the model's size: the first of two published files, and the converted one."""
    names, generator = {}, torch.Generator().manual_seed(5)
    for size, (config, dtype, sizes) in SIZES.items():
        state = published(generator, text=64, **sizes)
        tame = {name: (tensor * 0.05).to(dtype) for name, tensor in state.items()}
        folder = write_model(models / f"tiny cog {size}", tame, config)
        out = models / f"tiny cog {size}.safetensors"
        assert main([str(folder), "--out", str(out)]) == 0
        first = next((folder / "transformer").glob("*-00001-of-00002.safetensors"))
        names[size] = (first.relative_to(models).as_posix(), out.name)
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
def test_the_same_model_as_from_the_converted_file(
    comfyui, files, size, weight_dtype, dynamic_vram
):
    first, out = files[size]
    given = {"weight_dtype": weight_dtype, "dynamic_vram": dynamic_vram}
    got = comfyui.run("cogvideox_loaded", published=first, converted=out, **given)
    assert {first, out} <= set(got["offered"])
    assert first.replace("00001", "00002") not in got["offered"]
    assert got["dtypes"] == got["core's dtypes"]
    ours, core = got["facts"]
    assert ours == core and ours["model"] == "CogVideoX"
    assert got["weights differ"] == []
    assert got["finite"] and got["outputs are equal"]


@pytest.mark.skipif(sys.platform != "linux", reason="files of nothing may take room on the disk")
@pytest.mark.parametrize("size", ["5b", "1.5", "1.5-i2v"])
def test_a_model_of_the_published_size_arrives_whole(comfyui, models, size):
    """With DynamicVRAM: every parameter is the file's own, mapped, and none is copied."""
    first = write_empty(models / f"whole {size}", size).relative_to(models).as_posix()
    got = comfyui.run("cogvideox_at_its_size", name=first)
    shapes = shapes_of(**PUBLISHED[size])
    assert got["network"] == "CogVideoX"
    assert got["shapes"] == {core_name(name): list(shape) for name, shape in shapes.items()}
    assert got["ends"] == {core_name(name): [mark(name)] * 2 for name in shapes}
    assert got["taken"] < 200e6, "of eleven billion bytes"


def test_a_converted_file_loads_as_it_is(comfyui, files):
    _, out = files["5b"]
    given = {"weight_dtype": "default", "dynamic_vram": False}
    got = comfyui.run("cogvideox_loaded", published=out, converted=out, **given)
    assert got["weights differ"] == [] and got["outputs are equal"]

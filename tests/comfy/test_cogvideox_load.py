# SPDX-License-Identifier: Apache-2.0
"""CogVideoX from its published files in real ComfyUI, beside a file under ComfyUI's names in
ComfyUI's own loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cogvideox_files import ROTARY, SINCOS, published, shapes_of, write_model

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
def files(base_directory: Path) -> dict[str, str]:
    """Paths by the model's size: the first of two published files."""
    models = base_directory / "models" / "diffusion_models"
    models.mkdir(parents=True, exist_ok=True)
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
    given = {"weight_dtype": weight_dtype, "dynamic_vram": dynamic_vram}
    tensors = comfyui.run("cogvideox_loaded", published=files[size], **given)
    assert tensors == len(shapes_of(2, 2, ofs=SIZES[size][2].get("ofs"))) + (size == "2b")

# SPDX-License-Identifier: Apache-2.0
"""Quantized weights through a real GGUF loader, ComfyUI-GGUF: COMFYUI_GGUF names its checkout."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.comfy.expected import EIGHT_BIT, SPARSE_STEPS

CHECKOUT = os.environ.get("COMFYUI_GGUF", "")


def missing() -> str:
    if not CHECKOUT:
        return "needs the custom node ComfyUI-GGUF; name a checkout in COMFYUI_GGUF"
    if not (Path(CHECKOUT) / "loader.py").is_file():
        return f"COMFYUI_GGUF names {CHECKOUT}, which holds no ComfyUI-GGUF"
    if importlib.util.find_spec("gguf") is None:
        return "ComfyUI-GGUF's requirement gguf is not installed"
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.mark.parametrize("dynamic_vram", [False, True])
@pytest.mark.parametrize(
    ("family", "architecture", "quantization", "blocks"),
    [("wan", "wan", "Q8_0", 2), ("flux", "flux", "Q4_0", 3), ("hunyuan", "hyvid", "Q5_0", 3)],
)
def test_gguf_weights(comfyui, family, architecture, quantization, blocks, dynamic_vram):
    given = {"family": family, "architecture": architecture, "quantization": quantization}
    got = comfyui.run("gguf_weights", checkout=CHECKOUT, dynamic_vram=dynamic_vram, **given)
    everything, half, auto = got["runs"]
    for run in got["runs"]:
        assert run["sparse"] == SPARSE_STEPS * blocks
        assert all(call["dtypes"] == ["float32"] * 3 for call in run["calls"])
        assert all(call["classes"] == ["Tensor"] * 3 for call in run["calls"])
    assert "; error 0." in auto["text"]
    # The loader's class leaves the weights with DynamicVRAM only, and never reaches the library.
    assert ("GGMLTensor" in got["delivered"]) == dynamic_vram
    assert everything["error"] < EIGHT_BIT < half["error"]
    assert got["quantization_effect"] > 2e-3  # the weights are those of the file: Q8_0 is 0.01

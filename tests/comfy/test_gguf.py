# SPDX-License-Identifier: Apache-2.0
"""Quantized weights through a real GGUF loader, ComfyUI-GGUF: COMFYUI_GGUF names its checkout."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("COMFYUI_GGUF", "")
SPARSE_STEPS = 3  # of 4; start_percent 0.2 leaves the first dense
EIGHT_BIT = 0.004  # half of the blocks dropped is 0.02


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
    got = comfyui.run(
        "gguf_weights",
        checkout=CHECKOUT,
        family=family,
        architecture=architecture,
        quantization=quantization,
        dynamic_vram=dynamic_vram,
    )
    assert [report["sparse"] for report in got["reports"]] == 3 * [SPARSE_STEPS * blocks]
    assert "predicted error" in got["reports"][2]["text"]
    assert got["dtypes"] == ["float32"]
    # The loader's class leaves the weights with DynamicVRAM only, and never reaches the library.
    assert ("GGMLTensor" in got["delivered"]) == dynamic_vram
    assert got["received"] == ["Tensor"]
    assert got["error_all"] < EIGHT_BIT < got["error_half"]
    assert got["quantization_effect"] > 2e-3  # the weights are those of the file: Q8_0 is 0.01

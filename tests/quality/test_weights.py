# SPDX-License-Identifier: Apache-2.0
"""The weights' file of the small video DiT: what it keeps, and damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.tiny_video_dit import checkpoint
from benchmarks.tiny_video_dit.model import Config, VideoDiT, initialised

SIZES = Config(width=128, blocks=1, hidden=70, text_width=8)  # 70 and 8 are no multiples of three
MATRIX = "blocks.0.ffn.2.weight"
BF16_ROUNDING = 2**-8


@pytest.fixture(scope="module")
def model() -> VideoDiT:
    return initialised(SIZES, seed=0)


@pytest.fixture
def weights(model: VideoDiT, tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path, model.state_dict(), SIZES)


def test_numbers_come_back_to_half_a_step(model: VideoDiT, weights: Path) -> None:
    loaded = checkpoint.load_model(weights, dtype=torch.float32).state_dict()
    for name, saved in model.state_dict().items():
        if saved.ndim == 1 or name.endswith("modulation"):
            assert torch.equal(loaded[name], saved.bfloat16().float()), name
            continue
        rows, back = saved.flatten(1), loaded[name].flatten(1)
        largest = rows.abs().amax(1, keepdim=True)
        step = largest / checkpoint.LEVELS
        assert bool(((back - rows).abs() <= step / 2 + BF16_ROUNDING * largest).all()), name
    assert bool((loaded["head.head.weight"] == 0).all())


@pytest.mark.parametrize(
    ("name", "damaged", "sentence"),
    [
        (MATRIX, torch.zeros(128, 23, dtype=torch.int16), r"\(128, 23\); it should be"),
        (MATRIX, torch.zeros(128, 24, dtype=torch.int32), "int32 .* should be torch.int16"),
        (f"{MATRIX}.scale", None, "The weights' file has no"),
        (f"{MATRIX}.scale", torch.full((128, 1), torch.nan).half(), "is not finite"),
        ("head.head.bias", torch.zeros(64), "should be torch.bfloat16"),
    ],
)
def test_a_damaged_file_is_refused(
    weights: Path, name: str, damaged: Tensor | None, sentence: str
) -> None:
    tensors = load_file(weights)
    del tensors[name]
    if damaged is not None:
        tensors[name] = damaged
    with safe_open(weights, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, weights, metadata)
    with pytest.raises(ValueError, match=sentence):
        checkpoint.load_model(weights)

# SPDX-License-Identifier: Apache-2.0
"""Weights as a file that ComfyUI loads: the averaged ones in bf16, 15.3 MiB by default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.tiny_video_dit.model import Config, VideoDiT

WEIGHTS = "tiny_video_dit.safetensors"
SHIPPED = Path(__file__).with_name(WEIGHTS)  # the trained weights of this repository


def save(folder: Path, tensors: Mapping[str, Tensor], config: Config, **training: Any) -> Path:
    """Writes the tensors of a state dict; `training` describes the training in the header."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {
        # ComfyUI reads "config": the text's width is the one size it does not read off the weights.
        "config": json.dumps({"transformer": {"text_dim": config.text_width}}),
        "model": json.dumps(asdict(config)),
        "training": json.dumps(training),
    }
    # Copies, because views of one vector share memory, which safetensors refuses.
    stored = {name: each.to("cpu", torch.bfloat16, copy=True) for name, each in tensors.items()}
    save_file(stored, folder / WEIGHTS, metadata)
    return folder / WEIGHTS


def save_lora(path: Path, tensors: Mapping[str, Tensor], training: Mapping[str, Any]) -> None:
    """Writes a LoRA: by the name of a weight its `up` and `down`, or its whole `diff`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = {name: each.detach().to("cpu", torch.bfloat16) for name, each in tensors.items()}
    save_file(
        {name: each.contiguous() for name, each in stored.items()},
        path,
        {"training": json.dumps(training)},
    )


def describe(path: Path) -> dict[str, Any]:
    """Description in the header: "model" and "training" (steps, loss, seed, commit)."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    return {key: json.loads(metadata[key]) for key in ("model", "training")}


def load_model(
    path: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    lora: Path | None = None,
) -> VideoDiT:
    """Loads the model of a weights' file, ready to sample. lora: file of what is added to it."""
    model = VideoDiT(Config(**describe(path)["model"]))
    weights = load_file(path)
    if lora is not None:
        added = {name: each.float() for name, each in load_file(lora).items()}
        for name, weight in weights.items():
            diff = added.get(f"{name}.diff")
            diff = added[f"{name}.up"] @ added[f"{name}.down"] if diff is None else diff
            weights[name] = weight.float() + diff
    model.load_state_dict(weights)
    return model.to(device, dtype).train(False).requires_grad_(False)

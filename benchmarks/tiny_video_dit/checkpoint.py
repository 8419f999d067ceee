# SPDX-License-Identifier: Apache-2.0
"""Weights that ComfyUI loads, and two files that training goes on from. Safetensors only.

All three hold bf16, 15.3 MiB each by default: the averaged weights; the weights' distance from that
average, small enough that bf16 keeps 16 bits of the weights; and AdamW's second moment. Its first
moment, a memory of ten steps, starts again. Saving leaves the running state as a resumed one would
be, so going on and resuming are the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.tiny_video_dit.model import Config, VideoDiT
from benchmarks.tiny_video_dit.training_state import Counters, TrainingState

WEIGHTS = "tiny_video_dit.safetensors"
DISTANCE, SECOND = "resume_distance.safetensors", "resume_second_moment.safetensors"
SHIPPED = Path(__file__).with_name(WEIGHTS)  # the trained weights of this repository
STORED_TYPE = torch.bfloat16


def save(folder: Path, state: TrainingState, config: Config, header: dict[str, Any]) -> None:
    """Writes the three files; `header` describes the training and goes into the weights' file."""
    folder.mkdir(parents=True, exist_ok=True)
    average = state.average.to(STORED_TYPE)
    distance = (state.weights - average.float()).to(STORED_TYPE)
    second = state.second.to(STORED_TYPE)
    state.restore(average, distance, second)
    counters = asdict(state.counters)
    metadata = {
        # ComfyUI reads "config": the text's width is the one size it does not read off the weights.
        "config": json.dumps({"transformer": {"text_dim": config.text_width}}),
        "model": json.dumps(asdict(config)),
        "training": json.dumps(counters | header),
    }
    kept = {WEIGHTS: average, DISTANCE: distance, SECOND: second}
    for name, vector in kept.items():
        save_file(_on_cpu(state.named(vector)), folder / name, metadata)


def resume(folder: Path, state: TrainingState) -> None:
    """Goes on where `save` left off. Raises ValueError where the files are of another model."""
    average, distance, second = (
        state.joined(load_file(folder / name)) for name in (WEIGHTS, DISTANCE, SECOND)
    )
    state.restore(average, distance, second)
    training = describe(folder / DISTANCE)["training"]
    state.counters = Counters(training["step"], training["seconds"])


def describe(path: Path) -> dict[str, Any]:
    """Description in the header: "model" and "training" (steps, loss, seed, commit)."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    return {key: json.loads(metadata[key]) for key in ("model", "training")}


def load_model(
    path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> VideoDiT:
    """Loads the model of a weights' file, ready to sample."""
    model = VideoDiT(Config(**describe(path)["model"]))
    model.load_state_dict(load_file(path))
    return model.to(device, dtype).train(False).requires_grad_(False)


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies, because views of one vector share memory, which safetensors refuses."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

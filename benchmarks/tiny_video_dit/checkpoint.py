# SPDX-License-Identifier: Apache-2.0
"""Weights as a file of 5.5 MB by default: the averaged ones, matrices three numbers in 16 bits.

A number of a matrix is a whole multiple of the scale of its row, -LEVELS to LEVELS times it. Zeros
fill a row up to a multiple of three numbers. Other tensors are bf16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.tiny_video_dit.model import Config, VideoDiT

WEIGHTS = "tiny_video_dit.safetensors"
SHIPPED = Path(__file__).with_name(WEIGHTS)  # the trained weights of this repository
STUDENTS = (4, 8)  # steps of the students that are shipped
LEVELS = 19  # docs/experiments.md, Size of the small model's weights
BASE = 2 * LEVELS + 1
PLACES = (BASE * BASE, BASE, 1)  # of the numbers that share an int16
SMALLEST_SCALE = 2.0**-14  # the smallest normal float16
SCALE = ".scale"


def save(folder: Path, tensors: Mapping[str, Tensor], config: Config, **training: Any) -> Path:
    """Writes the tensors of a state dict; `training` describes the training in the header."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"model": json.dumps(asdict(config)), "training": json.dumps(training)}
    stored = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if _is_matrix(name, tensor):
            stored[name], stored[name + SCALE] = _packed(tensor.cpu())
        else:  # a copy, because views of one vector share memory, which safetensors refuses
            stored[name] = tensor.to("cpu", torch.bfloat16, copy=True)
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


def student(steps: int) -> Path:
    """File of the LoRA that the shipped student of so many steps adds to the weights."""
    return SHIPPED.with_name(f"{steps}_steps.safetensors")


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
    """Loads the model of a weights' file, ready to sample. lora: file of what is added to it.

    Raises ValueError where a tensor of the file is missing, of another shape or type, or not
    finite.
    """
    model, stored = VideoDiT(Config(**describe(path)["model"])), load_file(path)
    tensors = {name: _loaded(stored, name, like) for name, like in model.state_dict().items()}
    if lora is not None:
        added = {name: each.float() for name, each in load_file(lora).items()}
        for name, tensor in tensors.items():
            diff = added.get(f"{name}.diff")
            diff = added[f"{name}.up"] @ added[f"{name}.down"] if diff is None else diff
            tensors[name] = tensor.float() + diff
    model.load_state_dict(tensors)
    return model.to(device, dtype).train(False).requires_grad_(False)


def _is_matrix(name: str, tensor: Tensor) -> bool:
    return tensor.ndim > 1 and name.endswith("weight")


def _packed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns / 3) int16 and (rows, 1) float16 scales."""
    rows = matrix.float().flatten(1)
    scale = (rows.abs().amax(1, keepdim=True) / LEVELS).clamp_min(SMALLEST_SCALE).half()
    numbers = (rows / scale).round().clamp(-LEVELS, LEVELS)
    threes = pad(numbers, (0, -rows.shape[1] % len(PLACES))).unflatten(1, (-1, len(PLACES)))
    return (threes @ torch.tensor(PLACES).float()).short(), scale


def _loaded(stored: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """The bf16 tensor of a name, in the shape of `like`."""
    if not _is_matrix(name, like):
        return _checked(stored, name, like.shape, torch.bfloat16)
    rows, columns = like.flatten(1).shape
    packed = _checked(stored, name, (rows, -(-columns // len(PLACES))), torch.int16)
    scale = _checked(stored, name + SCALE, (rows, 1), torch.float16)
    unsigned = packed.int().unsqueeze(2) + BASE ** len(PLACES) // 2
    numbers = unsigned // torch.tensor(PLACES) % BASE - LEVELS
    return (numbers.flatten(1)[:, :columns] * scale.float()).bfloat16().view(like.shape)


def _checked(
    stored: Mapping[str, Tensor], name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The stored tensor of a name, of this shape and type and finite."""
    found = stored.get(name)
    if found is None:
        raise ValueError(f"The weights' file has no {name}.")
    if (found.shape, found.dtype) != (torch.Size(shape), dtype):
        raise ValueError(
            f"{name} of the weights' file is {found.dtype} {tuple(found.shape)}; it should be "
            f"{dtype} {tuple(shape)}."
        )
    if not found.isfinite().all():
        raise ValueError(f"{name} of the weights' file is not finite.")
    return found

# SPDX-License-Identifier: Apache-2.0
"""Tensors of a profile, and what makes them acceptable."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..order.variants import OrderKind
from .fingerprint import VALUES
from .profile_path import ProfileError
from .settings_table import SettingsTable

#: Name and dtype of each tensor, and the least and greatest value in it.
TENSORS = {
    "density": (torch.float32, 0.0, 1.0),
    "pool_weight": (torch.float32, 0.0, 100.0),  # beyond a block's keys it pools nothing
    "output_scale": (torch.float32, 1e-3, 1e3),
    "order_kind": (torch.int32, 0, len(OrderKind) - 1),  # index into the token orders
    "error": (torch.float32, 0.0, 1e6),
    "head_weight": (torch.float32, 0.0, 1e6),
    "measured": (torch.bool, 0, 1),
}


def tensors_of(settings: SettingsTable) -> dict[str, Tensor]:
    """Copies of the tensors: settings may share what safetensors wants apart."""
    return {name: getattr(settings, name).to("cpu", copy=True).contiguous() for name in TENSORS}


def checked_choices(tensors: dict[str, Tensor], prefix: str, floor: int) -> SettingsTable:
    """Takes its tensors out of `tensors`. Raises ProfileError for any that is not as it must be."""
    found: dict[str, Any] = {}
    for name, (dtype, least, greatest) in TENSORS.items():
        tensor = tensors.pop(prefix + name, None)
        if tensor is None:
            raise ProfileError(f"The profile has no tensor {prefix + name}.")
        if tensor.dtype != dtype or tensor.dim() != (1 if name == "measured" else 2):
            raise ProfileError(
                f"{prefix + name} has type {tensor.dtype} and shape {tuple(tensor.shape)}; it "
                f"takes {dtype} values by layer{'' if name == 'measured' else ' and head'}."
            )
        _check_values(prefix + name, tensor, least, greatest)
        found[name] = tensor
    shape = found["density"].shape
    for name, tensor in found.items():
        if tensor.shape != shape[: tensor.dim()]:
            raise ProfileError(
                f"{prefix + name} has shape {tuple(tensor.shape)} beside {tuple(shape)} of the "
                "densities."
            )
    return SettingsTable(**found, floor=floor)


def checked_norm(name: str, norm: Tensor) -> Tensor:
    if norm.dtype != torch.float32 or norm.dim() != 1 or norm.numel() > VALUES:
        raise ProfileError(
            f"{name} has type {norm.dtype} and shape {tuple(norm.shape)}; it takes up to {VALUES} "
            "float32 values."
        )
    _check_values(name, norm, -math.inf, math.inf)
    return norm


def _check_values(name: str, tensor: Tensor, least: float, greatest: float) -> None:
    if not tensor.numel():
        raise ProfileError(f"{name} is empty.")
    values = tensor.double()
    if not bool(values.isfinite().all()):
        raise ProfileError(f"{name} holds a value that is not finite.")
    low, high = float(values.min()), float(values.max())
    if low < least or high > greatest:
        raise ProfileError(
            f"{name} goes from {low:g} to {high:g}; it takes {least:g} to {greatest:g}."
        )

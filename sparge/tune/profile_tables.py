# SPDX-License-Identifier: Apache-2.0
"""Tensors of a profile, and what makes them acceptable."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..head_settings import Router
from ..order.variants import Walk
from .alternating import Alternating
from .choices import HeadChoices
from .fingerprint import SAMPLE
from .profile_error import ProfileError

#: Name and dtype of each tensor, and the least and greatest value in it.
TENSORS = {
    "density": (torch.float32, 0.0, 1.0),
    "gain": (torch.float32, 0.0, 100.0),  # beyond the keys of a block a pool weight pools nothing
    "contrast": (torch.float32, 1e-3, 1e3),
    "router": (torch.int32, min(Router), max(Router)),
    "walk": (torch.int32, 0, len(Walk) - 1),  # index into the token orders
    "error": (torch.float32, 0.0, 1e6),
    "loudness": (torch.float32, 0.0, 1e6),
    "measured": (torch.bool, 0, 1),
}


#: First version that has the tensor, and what heads of earlier files have instead.
LATER = {"loudness": (3, 1.0), "contrast": (5, 1.0)}
#: Kinds of steps, attributes of `Alternating`; each has all of these tensors.
KIND_NAMES = ("pooling", "dropping")


def tensors_of(choices: Alternating) -> dict[str, Tensor]:
    """Copies of the tensors: kinds may share what safetensors wants apart."""
    return {
        f"{kind}.{name}": getattr(getattr(choices, kind), name).to("cpu", copy=True).contiguous()
        for kind in KIND_NAMES
        for name in TENSORS
    }


def checked_choices(
    tensors: dict[str, Tensor], prefix: str, floor: int, version: int
) -> Alternating:
    """Takes its tensors out of `tensors`. Raises ProfileError for any that is not as it must be.

    Files before version 3 say what heads get in all steps.
    """
    prefixes = [f"{prefix}{kind}." for kind in KIND_NAMES] if version >= 3 else [prefix]
    for name, (first, value) in LATER.items():
        for of_kind in prefixes if version < first else ():
            _add(tensors, of_kind, name, value)
    if version < 3:
        same = _checked(tensors, prefix, floor)
        return Alternating.of(same, same)
    pooling, dropping = (_checked(tensors, of_kind, floor) for of_kind in prefixes)
    if pooling.density.shape != dropping.density.shape:
        raise ProfileError(
            f"The profile has {tuple(pooling.density.shape)} layers and heads for its pooling "
            f"steps and {tuple(dropping.density.shape)} for the dropping ones."
        )
    return Alternating.of(pooling, dropping)


def _add(tensors: dict[str, Tensor], prefix: str, name: str, value: float) -> None:
    """Adds a tensor that no file of an earlier version has, with one value for all of its heads."""
    if (density := tensors.get(prefix + "density")) is not None:
        tensors[prefix + name] = torch.full_like(density, value, dtype=torch.float32)


def _checked(tensors: dict[str, Tensor], prefix: str, floor: int) -> HeadChoices:
    found: dict[str, Tensor] = {}
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
    return HeadChoices(**found, floor=floor)


def checked_norm(name: str, norm: Tensor) -> Tensor:
    if norm.dtype != torch.float32 or norm.dim() != 1 or norm.numel() > SAMPLE:
        raise ProfileError(
            f"{name} has type {norm.dtype} and shape {tuple(norm.shape)}; it takes up to {SAMPLE} "
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

# SPDX-License-Identifier: Apache-2.0
"""Of what kind an argument is. A caller who gives another reads a sentence, not a traceback."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Kind = TypeVar("Kind")

_WHOLE = (int, np.integer, torch.SymInt)
_NUMBERS = (*_WHOLE, float, np.floating, torch.SymFloat)
_SHOWN = (str, bool, int, float, np.generic, type(None))


def shown(value: object) -> str:
    """What was given, for a message: short values themselves, of others the type."""
    if isinstance(value, _SHOWN):
        return repr(value)
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")


def check_kind(name: str, value: object, kind: type, give: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {shown(value)}; give {give}.")


def check_tensor(name: str, value: object, give: str) -> None:
    check_kind(name, value, Tensor, f"a torch tensor: {give}")


def flag(name: str, value: Any) -> bool:
    """`value` as Python's own. Raises ValueError for what is neither True nor False."""
    if not isinstance(value, (bool, np.bool_, torch.SymBool)):
        raise ValueError(f"{name} is {shown(value)}; it takes True or False.")
    return bool(value) if isinstance(value, np.generic) else value


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value` as Python's own number. Raises ValueError for anything but a whole number from
    `least` (to `most`)."""
    number = isinstance(value, _WHOLE) and not isinstance(value, bool)
    if not number or value < least or (most is not None and value > most):
        end = "" if most is None else f" to {most}"
        raise ValueError(f"{name} is {shown(value)}; it takes a whole number from {least}{end}.")
    return int(value) if isinstance(value, np.generic) else value


def number(name: str, value: Any, give: str = "a number") -> float:
    """`value` as Python's own number. Raises ValueError for what is none; True is none."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise ValueError(f"{name} is {shown(value)}; give {give}.")
    return value.item() if isinstance(value, np.generic) else value

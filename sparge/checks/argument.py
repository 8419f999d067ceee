# SPDX-License-Identifier: Apache-2.0
"""Checks of a caller's arguments: a value of the wrong kind raises a sentence, not a traceback."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import Unsupported

_WHOLE = (int, np.integer, torch.SymInt)
_NUMBERS = (*_WHOLE, float, np.floating, torch.SymFloat)
_SHOWN = (str, bool, int, float, np.generic, torch.dtype, type(None))


def shown(value: object) -> str:
    """Text that shows what was given, for a message: short values themselves, of others the
    type.
    """
    if isinstance(value, _SHOWN):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")


def check_kind(name: str, value: object, kind: type, give: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {shown(value)}; give {give}.")


def check_tensor(name: str, value: Any, give: str) -> None:
    check_kind(name, value, Tensor, f"a torch tensor: {give}")
    if value.is_nested or value.layout != torch.strided:
        kind = "nested" if value.is_nested else f"of layout {value.layout}"
        raise Unsupported(
            f"{name} is {kind}, and only plain tensors are served: pad nested ones and give "
            "key_lengths, or call attention for each part; of sparse ones give to_dense().",
            "own",
        )


def flag(name: str, value: Any) -> bool:
    """Returns `value` as Python's own bool. Raises ValueError for what is neither True nor
    False.
    """
    if not isinstance(value, (bool, np.bool_, torch.SymBool)):
        raise ValueError(f"{name} is {shown(value)}; it takes True or False.")
    return cast("bool", _plain(value))


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Returns `value` as Python's own int. Raises ValueError for anything but a whole number from
    `least` (to `most`)."""
    number = isinstance(value, _WHOLE) and not isinstance(value, bool)
    if not number or value < least or (most is not None and value > most):
        end = "" if most is None else f" to {most}"
        raise ValueError(f"{name} is {shown(value)}; it takes a whole number from {least}{end}.")
    return cast("int", _plain(value))


def number(name: str, value: Any, give: str = "a number") -> float:
    """Returns `value` as Python's own float. Raises ValueError for what is no number; True is
    none.
    """
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise ValueError(f"{name} is {shown(value)}; give {give}.")
    return cast("float", _plain(value))


def _plain(value: object) -> object:
    """Turns numbers of NumPy into Python's; a size that torch.compile traces stays what it is."""
    return value.item() if isinstance(value, np.generic) else value

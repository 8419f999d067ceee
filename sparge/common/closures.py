# SPDX-License-Identifier: Apache-2.0
"""Tells a pack that chains our override from one that overwrote it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

#: Types that lead everywhere from a closure, so they are not searched.
_NOT_WALKED = (type, ModuleType, torch.nn.Module)


def leads_to(override: Callable[..., Any], is_target: Callable[[Any], bool]) -> bool:
    """Whether calling ``override`` can reach a target.

    It does when it keeps one in a closure, a partial, a bound method, or an attribute of an object
    that these hold. Nothing but is_target is called.
    """
    seen: set[int] = set()
    pending: list[Any] = [override]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if is_target(item):
            return True
        pending.extend(_held_by(item))
    return False


def _held_by(item: Any) -> list[Any]:
    if isinstance(item, FunctionType):
        held = []
        for cell in item.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # a cell that is not filled yet
                continue
        return [value for value in held if callable(value) or _is_plain_state(value)]
    if isinstance(item, MethodType):
        return [item.__func__, item.__self__]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, _NOT_WALKED):
        return []
    return [value for value in getattr(item, "__dict__", {}).values() if callable(value)]


def _is_plain_state(value: Any) -> bool:
    """Whether a value is an object of a pack's own, as opposed to data or a model."""
    return hasattr(value, "__dict__") and not isinstance(value, _NOT_WALKED)

# SPDX-License-Identifier: Apache-2.0
"""Functions that torch.compile calls without tracing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keeps torch.compile from tracing what reads Python state, which a trace would freeze."""
    return cast("_Function", torch.compiler.disable(function))

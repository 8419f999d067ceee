# SPDX-License-Identifier: Apache-2.0
"""Backend: the function that computes exact attention on a user's machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ..common.torch_attention import exact_attention


@dataclass(frozen=True)
class Backend:
    """A function for exact attention and its name, which stands for it in stored tables."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = field(compare=False, repr=False)
    """Gives some result of q, k and v (B, H, N, D), in any layout."""


TORCH = Backend("attention_pytorch", exact_attention)

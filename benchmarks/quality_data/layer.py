# SPDX-License-Identifier: Apache-2.0
"""Layers that every data set hands out: attention calls of a trained network."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparge.order.grid import TokenGrid


class Layer(NamedTuple):
    """q (1, heads, tokens, head_dim), k and v (1, KV heads, tokens, head_dim), one dtype."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    grid: TokenGrid | None
    """Token grid; None for a text."""

# SPDX-License-Identifier: Apache-2.0
"""Layers that every data set hands out: attention calls of a trained network."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparge.order.grid import TokenGrid


class Layer(NamedTuple):
    """q, k and v (1, heads, tokens, head_dim) of one dtype, and the grid of their tokens."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    grid: TokenGrid

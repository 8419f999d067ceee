# SPDX-License-Identifier: Apache-2.0
"""Keeps a GPU as busy as a model does between its attention calls.

A video model multiplies matrices for most of its time, at the GPU's power limit, and its attention
runs at the clocks that leaves. Where the GPU rests before each call instead, cuDNN's attention is a
fifth faster than in a model (H200, Mochi: 35.6 instead of 43.1 ms), as it draws the most power.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 8192  # of a square matrix: a product of two takes 1.5 ms of an H200
#: Before each call: some ms, in which the host queues it.
PRODUCTS = 4
#: Loads until clocks have fallen to what they stay at: about 60 ms.
WARM_UP = 10


@dataclass(frozen=True)
class ModelLoad:
    """Call it to queue the products."""

    left: Tensor
    right: Tensor
    out: Tensor

    @classmethod
    def on(cls, device: str | torch.device, side: int = SIDE) -> ModelLoad:
        """Of random numbers: zeros take less power."""
        left, right = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
        return cls(left, right, torch.empty_like(left))

    def __call__(self) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self.left, self.right, out=self.out)

    def heat_up(self) -> None:
        """After a rest the clocks of the first calls would be too high."""
        for _ in range(WARM_UP):
            self()

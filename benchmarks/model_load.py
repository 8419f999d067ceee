# SPDX-License-Identifier: Apache-2.0
"""Load that keeps a GPU as busy as a model does between its attention calls.

There a video model multiplies matrices, at the GPU's power limit, and its attention runs at the
clocks that leaves (docs/experiments.md, Clocks of a model between its attention calls).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 8192  # of a square matrix: a product of two takes 1.5 ms of an H200
#: Before each call: some ms, in which the host queues it.
PRODUCTS = 4
#: Loads until clocks have fallen to where they stay: about 60 ms.
WARM_UP = 10


@dataclass(frozen=True)
class ModelLoad:
    """Products of two matrices; call it to queue them."""

    left: Tensor
    right: Tensor
    out: Tensor

    @classmethod
    def on(cls, device: str | torch.device, side: int = SIDE) -> ModelLoad:
        """Load of random numbers: zeros take less power."""
        left, right = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
        return cls(left, right, torch.empty_like(left))

    def __call__(self) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self.left, self.right, out=self.out)

    def heat_up(self) -> None:
        """Runs until the GPU is warm. After a rest the clocks of the first calls would be too
        high.
        """
        for _ in range(WARM_UP):
            self()

# SPDX-License-Identifier: Apache-2.0
"""Keeps a GPU as busy as a model does between its attention calls.

There a video model multiplies matrices, at the GPU's power limit, and its attention runs at the
clocks that leaves. H200, Mochi's shape: cuDNN takes 43.4 ms after products (86abb0a), 35.6 by rates
from calls before which the GPU slept (2a62f0d). A layer of Wan 480p in ComfyUI (2b6acb2) takes 65.4
ms by flash and 5.7 by a sparse call at 20 %: 67.1 and 5.9 by the former rates, 60.4 and 4.7 by the
latter.
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

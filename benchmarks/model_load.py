# SPDX-License-Identifier: Apache-2.0
"""Load that keeps a GPU as busy as a model does between its attention calls.

There a video model multiplies matrices, at the GPU's power limit, and its attention runs at the
clocks that leaves (docs/experiments.md, Clocks of a model between its attention calls).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 8192  # of a square matrix: a product of two takes 1.5 ms of an H200
PRODUCTS = 4  # before each call: some ms, in which the host queues it
WARM_UP = 10  # loads until clocks have fallen to where they stay: about 60 ms


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


def loaded_ms(work: Callable[[], object], load: ModelLoad, repeats: int) -> float:
    """Median milliseconds of the GPU of calls that wait in the queue behind the load."""
    work()
    spans = []
    for _ in range(WARM_UP):
        load()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        load()
        start.record()
        work()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in spans)

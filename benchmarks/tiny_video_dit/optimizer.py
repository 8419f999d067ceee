# SPDX-License-Identifier: Apache-2.0
"""AdamW on float32 weights of a model that computes in bf16, and their running average."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

FOREACH: Any = torch  # whose stubs lack these functions
WORKING_TYPE = torch.bfloat16
BETAS, WEIGHT_DECAY = (0.9, 0.99), 0.01  # the decay on matrices only
LARGEST_GRADIENT = 1.0  # norm; larger ones are scaled down
#: Half-life of 700 steps; shorter at first, so that the average does not start from noise.
AVERAGE_DECAY = 0.999


class Optimizer:
    """Optimizer that takes over `model`, whose parameters become copies in bf16."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        start = {name: p.detach().to(device).float() for name, p in model.named_parameters()}
        self.working = list(model.to(device, WORKING_TYPE).parameters())
        self.weights = [each.clone().requires_grad_() for each in start.values()]
        self.average = {name: each.clone() for name, each in start.items()}
        self.step = 0
        for weight, working in zip(self.weights, self.working, strict=True):
            weight.grad, working.grad = torch.zeros_like(weight), torch.zeros_like(working)
        groups = [
            {"params": [w for w in self.weights if w.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [w for w in self.weights if w.ndim == 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, betas=BETAS, fused=device.type == "cuda")

    @torch.no_grad()
    def update(self, rate: float) -> Tensor:
        """Makes one step with the collected gradients, which it clears; returns their norm."""
        self.step += 1
        given = [working.grad for working in self.working]
        FOREACH._foreach_copy_([weight.grad for weight in self.weights], given)
        norm = clip_grad_norm_(self.weights, LARGEST_GRADIENT, foreach=True)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        kept = min(AVERAGE_DECAY, self.step / (self.step + 10))
        FOREACH._foreach_lerp_(list(self.average.values()), self.weights, 1 - kept)
        self.show(self.weights)
        FOREACH._foreach_zero_(given)
        return norm

    @torch.no_grad()
    def show(self, weights: Iterable[Tensor]) -> None:
        """Makes these the weights that the model computes with."""
        FOREACH._foreach_copy_(self.working, list(weights))

# SPDX-License-Identifier: Apache-2.0
"""Weights, their running average and AdamW's moments, each one vector: a step is a dozen launches.

The model computes in bf16 on a copy; the weights themselves are float32. AdamW is that of
Loshchilov & Hutter (2019), the weight decay on matrices only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORKING_TYPE = torch.bfloat16
FIRST_DECAY, SECOND_DECAY = 0.9, 0.99
WEIGHT_DECAY = 0.01
TINY = 1e-8
LARGEST_GRADIENT = 1.0  # norm; larger ones are scaled down
#: Half-life of 700 steps; shorter at first, so that the average does not start from noise.
AVERAGE_DECAY = 0.999


class Optimizer:
    """Optimizer that takes over the parameters of `model`: they become views of one bf16 vector."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        parameters = dict(model.named_parameters())
        # Matrices first, so that weight decay is one slice.
        names = sorted(parameters, key=lambda name: parameters[name].ndim == 1)
        self.shapes = {name: parameters[name].shape for name in names}
        flat = [parameters[name].detach().to(device).float().flatten() for name in names]
        self.decayed = sum(parameters[name].numel() for name in names if parameters[name].ndim > 1)
        self.weights = torch.cat(flat)
        self.average = self.weights.clone()
        self.first = torch.zeros_like(self.weights)
        self.second = torch.zeros_like(self.weights)
        self.working = self.weights.to(WORKING_TYPE, copy=True)
        self.gradient = torch.zeros_like(self.working)
        self.step = 0
        values, gradients = self.named(self.working), self.named(self.gradient)
        for name, parameter in parameters.items():
            parameter.data, parameter.grad = values[name], gradients[name]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector, by parameter."""
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in named}

    @torch.no_grad()
    def update(self, rate: float) -> Tensor:
        """Makes one AdamW step with the collected gradients, which it clears; returns their
        norm."""
        self.step += 1
        gradient = self.gradient.float()
        norm = gradient.norm()
        gradient *= (LARGEST_GRADIENT / (norm + TINY)).clamp(max=1)
        self.first.lerp_(gradient, 1 - FIRST_DECAY)
        self.second.lerp_(gradient.square(), 1 - SECOND_DECAY)
        self.weights[: self.decayed] *= 1 - rate * WEIGHT_DECAY
        deviation = (self.second / (1 - SECOND_DECAY**self.step)).sqrt_().add_(TINY)
        self.weights.addcdiv_(self.first, deviation, value=-rate / (1 - FIRST_DECAY**self.step))
        self.average.lerp_(self.weights, 1 - min(AVERAGE_DECAY, self.step / (self.step + 10)))
        self.working.copy_(self.weights)
        self.gradient.zero_()
        return norm

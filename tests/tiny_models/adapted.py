# SPDX-License-Identifier: Apache-2.0
"""Layer with an adapter, as LoRA puts in the place of a model's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """Linear layer whose output another one of the same shape changes."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        change = nn.Linear(base.in_features, base.out_features)
        self.base_layer, self.change = base, change.to(base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.change(x)


@torch.no_grad()
def adapt(block: nn.Module, name: str) -> None:
    """Puts an adapter around the linear layer `name` of a block."""
    setattr(block, name, Adapted(getattr(block, name)))

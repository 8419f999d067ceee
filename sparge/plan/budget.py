# SPDX-License-Identifier: Apache-2.0
"""What each head may keep and how it makes up for what it drops: measured, never assumed."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor


class Router(enum.IntEnum):
    """What a head ranks key blocks by."""

    MASS = 0
    """The share of attention that pooled queries and keys give the block."""
    ERROR = 1
    """The error that the block's pooled term would make in its place."""


@dataclass(frozen=True, eq=False)
class HeadBudget:
    """One value per query head; replaces the density of a `SparsePolicy`.

    density: (heads,) float32, 0..1: share of all key blocks that a query block ranks in
        (`select_by="topk"`), or the share of the ranking weight it keeps (`"cdf"`).
    gain: (heads,) float32 >= 0: factor of the pooled term that stands for dropped blocks; 0 is
        plain dropping and costs nothing.
    router: (heads,) int32, values of `Router`.
    floor: ranked key blocks that every query block keeps, whatever its density.

    Values are not checked: reading them would synchronise with the GPU.
    """

    density: Tensor
    gain: Tensor
    router: Tensor
    floor: int = 1

    def __post_init__(self) -> None:
        for name, dtype in (("gain", torch.float32), ("router", torch.int32)):
            _check(name, getattr(self, name), dtype, self.heads)
        _check("density", self.density, torch.float32, self.heads)
        if self.floor < 1:
            raise ValueError(f"floor is {self.floor}; a query block keeps at least 1 key block.")

    @property
    def heads(self) -> int:
        return self.density.numel()

    @classmethod
    def uniform(
        cls, heads: int, density: float, gain: float = 0.0, router: Router = Router.MASS
    ) -> HeadBudget:
        """The same for every head, on the CPU."""
        return cls(
            torch.full((heads,), density),
            torch.full((heads,), gain),
            torch.full((heads,), int(router), dtype=torch.int32),
        )


def _check(name: str, value: Tensor, dtype: torch.dtype, heads: int) -> None:
    if value.dtype != dtype or value.shape != (heads,):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} and type {value.dtype}; give one {dtype} value "
            f"for each of the {heads} query heads."
        )

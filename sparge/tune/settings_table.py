# SPDX-License-Identifier: Apache-2.0
"""Settings of the heads of all layers, as a tuner chose them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..head_settings import OPTIONAL, HeadSettings, Router
from ..policy import SparsePolicy
from .head_weights import mean_error


class LayerSettings:
    """Head settings of one step by layer; None for layers that were not measured, which stay dense.

    They are made when each layer asks: before a pass the GPU waits for the host, in the pass the
    host has time. They are views of one settings of all heads, so making them allocates nothing.
    """

    def __init__(
        self, of_all: HeadSettings, measured: Sequence[bool], policy: SparsePolicy | None = None
    ) -> None:
        """of_all: settings of the heads of all layers, one layer after the other. policy: of the
        calls; with it their tables are made here all at once, because single ones take seven
        launches a layer."""
        self.of_all, self.measured = of_all, measured
        self._heads = of_all.heads // len(measured)
        self._policy = policy
        self._table = None if policy is None else of_all.table(policy, hold=True)
        self._made: dict[int, HeadSettings] = {}

    def __len__(self) -> int:
        return len(self.measured)

    def __iter__(self) -> Iterator[HeadSettings | None]:
        return (self[layer] for layer in range(len(self)))

    def __getitem__(self, layer: int) -> HeadSettings | None:
        layer = range(len(self))[layer]
        if not self.measured[layer]:
            return None
        if layer not in self._made:
            self._made[layer] = self._make(slice(layer * self._heads, (layer + 1) * self._heads))
        return self._made[layer]

    def _make(self, heads: slice) -> HeadSettings:
        head_settings = self.of_all.heads_slice(heads)
        if self._policy is not None and self._table is not None:
            head_settings.keep_table(self._policy, self._table[heads])
        return head_settings


@dataclass(frozen=True, eq=False)
class SettingsTable:
    """Head settings, each (layers, heads) on the CPU. Rows of layers that were not measured hold
    density 1.

    density, pool_weight, output_scale float32, order_kind int32: as in `HeadSettings`.
    error float32: expected relative L2 error of the attention output. head_weight float32: what a
    head counts in means over heads; 1 in the mean, 0 in layers that were not measured.
    """

    density: Tensor
    pool_weight: Tensor
    output_scale: Tensor
    order_kind: Tensor
    error: Tensor
    head_weight: Tensor
    measured: Tensor
    """(layers,) bool: whether the layer was measured."""
    floor: int = 1
    router: Router = Router.ERROR
    """Router of all heads."""

    @property
    def layers(self) -> int:
        return self.density.shape[0]

    @property
    def heads(self) -> int:
        return self.density.shape[1]

    @property
    def mean_error(self) -> float:
        """Mean error over heads, each by its weight: what a target is of. NaN where no head
        counts.
        """
        error = mean_error(self.error, self.head_weight)
        return math.nan if error is None else error

    def of_heads(self, heads: slice) -> SettingsTable:
        """The same of some of the heads."""
        own = {
            part.name: getattr(self, part.name)[:, heads]
            for part in fields(self)
            if part.name not in ("measured", "floor", "router")
        }
        return replace(self, **own)

    def of_layers(
        self,
        device: torch.device | str = "cpu",
        policy: SparsePolicy | None = None,
        *,
        before: LayerSettings | None = None,
    ) -> LayerSettings:
        """Returns the head settings of each layer, uploaded all at once.

        Layers have one structure: token orders in all of them or, where all heads take the first,
        in none; output scales in all or, where no head has one, in none. What a call allocates
        depends on that structure, and ComfyUI wants it to stay the same from step to step. Not
        every call can have output scales, and torch.compile would trace either kind.

        policy: as in `LayerSettings`. before: head settings of the step before, whose structure is
        kept.
        """
        names = ("density", "pool_weight", *OPTIONAL)
        uploaded: dict[str, Any] = {
            name: getattr(self, name).to(device, copy=True).flatten() for name in names
        }
        other = before.of_all if before is not None and any(before.measured) else None
        router = torch.full_like(uploaded["density"], self.router, dtype=torch.int32)
        pools = self.router == Router.ERROR or bool(self.pool_weight.any())
        pools |= other is not None and other.pools
        for name, (_, none) in OPTIONAL.items():
            is_used = bool((getattr(self, name) != none).any())
            if not is_used and (other is None or getattr(other, name) is None):
                uploaded[name] = None
        of_all = HeadSettings(**uploaded, router=router, floor=self.floor, pools=pools)
        return LayerSettings(of_all, self.measured.tolist(), policy)

    def head_settings(self, layer: int, device: torch.device | str = "cpu") -> HeadSettings | None:
        """Returns the head settings of one layer; None where it was not measured."""
        return self.of_layers(device)[layer]

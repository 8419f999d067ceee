# SPDX-License-Identifier: Apache-2.0
"""Head settings of one step, made when each layer asks.

Before a pass the GPU waits for the host, in the pass the host has time. They are views of one
settings of all heads, so making them allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..head_settings import HeadSettings
from ..policy import SparsePolicy


class LayerSettings:
    """Head settings by layer; None for layers that were not measured, which stay dense."""

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

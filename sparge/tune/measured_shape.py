# SPDX-License-Identifier: Apache-2.0
"""Results of the heads of one attention shape, kept when a run is over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..order.variants import OrderKind
from .head_table import HeadTable
from .head_weights import mean_error


@dataclass(frozen=True, eq=False)
class MeasuredShape:
    """The heads of one attention shape. Tables are (layers, heads) float32 of measured layers."""

    tokens: int
    layers: Tensor
    """(layers,) int64: number of each layer that was sparse, in some step at least."""
    density: Tensor
    """Share of attention that was kept, forced blocks included, as in `HeadTable.density`."""
    predicted: Tensor
    """Relative L2 error expected when the settings were made, the mean over the steps."""
    head_weight: Tensor
    """Head weights, as in `SettingsTable`."""
    pool_weight: Tensor
    """Pool weights, as first chosen; 0 is none. Where steps differ that of their mean density, and
    so are the token orders."""
    order_kinds: Mapping[OrderKind, int]
    """Number of heads by their token order; empty where there was no choice."""
    one_order: bool = False
    """Whether one token order alone was measured, as in `HeadTable`."""

    @classmethod
    def of(cls, table: HeadTable) -> MeasuredShape:
        """Sums up a table. Waits for the GPU."""
        assert table.settings is not None
        layers = torch.tensor(sorted(table.sparse_rows), dtype=torch.int64, device="cpu")
        tables = (table.density(), table.predicted())
        order_kinds: dict[OrderKind, int] = {}
        if table.shape.grid is not None:
            taken = table.settings.order_kind[layers].flatten().tolist()
            order_kinds = {order_kind: taken.count(order_kind) for order_kind in OrderKind}
        chosen = table.settings
        tables = (*tables, chosen.head_weight, chosen.pool_weight)
        of_layers = (x[layers] for x in tables)
        return cls(
            table.shape.tokens,
            layers,
            *of_layers,
            order_kinds=order_kinds,
            one_order=table.measuring.one_order,
        )

    def lines(self) -> Iterator[str]:
        """Lines of the layers, below a line that names their columns."""
        yield f"{self.tokens:,} tokens: layer, density (least to most), error predicted"
        for index, layer in enumerate(self.layers.tolist()):
            density = self.density[index]
            yield (
                f"{layer:4d}  {percent(density.mean())} ({percent(density.min())} to "
                f"{percent(density.max())})  {self._error(index)}"
            )

    def _error(self, index: int) -> str:
        error = mean_error(self.predicted[index], self.head_weight[index])
        return "-" if error is None else f"{error:.3f}"


def percent(share: Tensor) -> str:
    return f"{100 * float(share):.1f} %"

# SPDX-License-Identifier: Apache-2.0
"""Head settings: what a head may keep and how it makes up for what it drops.

They are measured, never assumed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .checks.argument import check_tensor, flag, number, shown, whole_number
from .policy import SparsePolicy
from .thresholds import threshold_table


class Router(enum.IntEnum):
    """Quantity that a head ranks key blocks by."""

    MASS = 0
    """Share of attention that pooled queries and keys give the block."""
    ERROR = 1
    """Error that pooled keys would make in the block's place."""


#: Types of the values of heads, those that may be None last.
DTYPES = {
    "density": torch.float32,
    "pool_weight": torch.float32,
    "router": torch.int32,
    "order_kind": torch.int32,
    "output_scale": torch.float32,
}
OPTIONAL = ("order_kind", "output_scale")


class SettingsFacts(NamedTuple):
    """Plain values of head settings."""

    heads: int
    pools: bool
    has_order_kind: bool
    has_output_scale: bool


@dataclass(frozen=True, eq=False)
class HeadSettings:
    """Head settings: one value per query head; replaces the density of a `SparsePolicy`.

    density: (heads,) float32, 0..1. With `select_by="topk"` the share of all key blocks that a
        query block ranks in; it keeps one more where that and the blocks that are always kept are
        an odd number, because on Hopper two take as long as one. With `"cdf"` the share of the
        ranking weight that it keeps.
    pool_weight: (heads,) float32 >= 0: factor of the pooled keys that stand for dropped blocks; 0
        is plain dropping and costs nothing.
    router: (heads,) int32, values of `Router`.
    output_scale: (heads,) float32 > 0: factor of the output's distance from the mean value of all
        keys, in query blocks that drop something; None: 1 for all. Pooled keys draw
        outputs towards that mean, plain dropping draws them apart. It takes no time. With 8-bit
        operands, not causal: the mean would tell of later keys.
    pools: whether any pool weight is above 0 or any router `ERROR`: with False kernels prepare
        neither.
    order_kind: (heads,) int32, index of the token order that each head takes among those of the
        call, the last where there are fewer; None: the first. Heads that share keys take the order
        of the first of them.

    Values are not checked: reading them would synchronise with the GPU.
    """

    density: Tensor
    pool_weight: Tensor
    router: Tensor
    pools: bool = True
    order_kind: Tensor | None = None
    output_scale: Tensor | None = None
    facts: str = field(default="", init=False, repr=False)
    """`SettingsFacts` as text."""
    # Not given, so that `replace` makes new ones: tables hold these values.
    _tables: dict[Hashable, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_tensor("density", self.density, "one float32 value for each query head")
        for name in DTYPES:
            if getattr(self, name) is not None or name not in OPTIONAL:
                self._check(name, getattr(self, name))
        if self.order_kind is not None:  # kernels read it in place
            object.__setattr__(self, "order_kind", self.order_kind.contiguous())
        object.__setattr__(self, "pools", flag("pools", self.pools))
        object.__setattr__(self, "facts", self._facts())

    def _facts(self) -> str:
        optional = [getattr(self, name) is not None for name in OPTIONAL]
        return repr((self.heads, self.pools, *optional))

    @property
    def heads(self) -> int:
        return self.density.numel()

    @property
    def device(self) -> torch.device:
        return self.density.device

    def on(self, device: torch.device | str) -> HeadSettings:
        """Same values on `device`."""
        return replace(self, **{name: x.to(device) for name, x in self.tensors.items()})

    def heads_slice(self, heads: slice) -> HeadSettings:
        """Settings of some of the query heads: views of these and of their tables, which nothing
        checks anew."""
        made = object.__new__(HeadSettings)
        values = vars(made)
        values.update(vars(self))
        for name in DTYPES:
            if values[name] is not None:
                values[name] = values[name][heads]
        values["facts"] = made._facts()
        values["_tables"] = {key: table[heads] for key, table in self._tables.items()}
        return made

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Values of heads, by name."""
        values = {name: getattr(self, name) for name in DTYPES}
        return {name: value for name, value in values.items() if value is not None}

    def _check(self, name: str, value: Tensor) -> None:
        dtype, heads = DTYPES[name], self.heads
        check_tensor(name, value, f"one {dtype} value for each of the {heads} query heads")
        if value.dtype != dtype or value.shape != (heads,):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} and type {value.dtype}; give one {dtype} "
                f"value for each of the {heads} query heads."
            )
        if value.device != self.device:
            raise ValueError(
                f"{name} is on {value.device} and density on {self.device}: put all values of "
                "head settings on one device."
            )

    def table(self, policy: SparsePolicy) -> Tensor:
        """Returns `threshold_table` of these settings with the other thresholds of `policy`.

        Tables live as long as the settings for policies whose thresholds are numbers: a call
        launches nothing to make one, and CUDA graphs read them where they lie.
        """
        key = policy.simthreshd1, policy.pvthreshd
        if isinstance(key[0], Tensor) or isinstance(key[1], Tensor):  # whose values may change
            return self._make_table(policy)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._make_table(policy)
        return table

    def _make_table(self, policy: SparsePolicy) -> Tensor:
        return threshold_table(
            self.heads,
            self.device,
            selection=self.density,
            simthreshd1=policy.simthreshd1,
            pvthreshd=policy.pvthreshd,
            log2_pool_weight=self.pool_weight.log2(),
            router=self.router,
            output_scale=1.0 if self.output_scale is None else self.output_scale,
        )

    @classmethod
    def uniform(
        cls,
        heads: int,
        density: float,
        pool_weight: float = 0.0,
        router: Router = Router.MASS,
        device: torch.device | str = "cpu",
    ) -> HeadSettings:
        """Same settings for every head."""
        heads = whole_number("heads", heads, 1)
        density, pool_weight = number("density", density), number("pool_weight", pool_weight)
        if not (0 <= density <= 1 and 0 <= pool_weight < math.inf):
            raise ValueError(
                f"density is {density} and pool_weight {pool_weight}; density takes a number from "
                "0 to 1, pool_weight a finite one from 0."
            )
        if router not in list(Router):
            raise ValueError(f"router is {shown(router)}; it takes Router.MASS or Router.ERROR.")
        return cls(
            torch.full((heads,), density, dtype=torch.float32, device=device),
            torch.full((heads,), pool_weight, dtype=torch.float32, device=device),
            torch.full((heads,), int(router), dtype=torch.int32, device=device),
            pools=pool_weight > 0 or router == Router.ERROR,
        )

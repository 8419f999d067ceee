# SPDX-License-Identifier: Apache-2.0
"""Rules of each stage, and what it reads of an order: from the pipeline through the op to the
launch.

A new field stands here alone: ops take `flat`, and make the dataclass of it again.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

#: Whole numbers, flags and numbers.
FlatRules: TypeAlias = "tuple[list[int], list[bool], list[float]]"
#: The same in an op's schema.
FLAT_SCHEMA = "SymInt[] numbers, bool[] flags, float[] scalars"


class Rules:
    """A dataclass whose fields are int, bool and float."""

    _names: ClassVar[dict[str, tuple[str, ...]]]

    def __init_subclass__(cls) -> None:
        kinds = cls.__annotations__
        cls._names = {
            kind: tuple(name for name in kinds if kinds[name] == kind)
            for kind in ("int", "bool", "float")
        }
        assert sum(map(len, cls._names.values())) == len(kinds), "a field of another kind"

    def flat(self) -> FlatRules:
        names = self._names
        return (
            [getattr(self, name) for name in names["int"]],
            [getattr(self, name) for name in names["bool"]],
            [getattr(self, name) for name in names["float"]],
        )

    @classmethod
    def of_flat(
        cls, numbers: Sequence[int], flags: Sequence[bool], scalars: Sequence[float]
    ) -> Self:
        values = zip(cls._names.values(), (numbers, flags, scalars), strict=True)
        return cls(**{n: x for names, of in values for n, x in zip(names, of, strict=True)})


@dataclass(frozen=True)
class QuantizeRules(Rules):
    smooth_k: bool = True
    with_queries: bool = True
    with_pools: bool = False
    with_similarity: bool = True
    """False where `simthreshd1` is below 0 for every head: similarities are then 1, or NaN where a
    block's mean is no number (such keys have none, or their sum overflows): that fails every
    threshold, as the similarity of keys that are no numbers does."""
    with_query_means: bool = True
    """False where route keeps every block: what a workspace with_queries has room for stays
    unwritten then, and Q unread."""


class Select(enum.IntEnum):
    """Rule that decides among the blocks that nothing forces; as in ``csrc/params.cuh``."""

    TOPK = 0
    CDF = 1
    MASK = 2


@dataclass(frozen=True)
class RouteRules(Rules):
    """The scalars of a policy by their names in `RouteParams`; ``select`` is a ``Select``."""

    select: int
    topk_blocks: int
    cdfthreshd: float
    simthreshd1: float
    score_scale: float
    causal: bool
    attention_sink: bool
    keep_diagonal: bool
    exact_prefix: int
    exact_suffix: int
    floor: int = 1
    upstream: bool = True
    """Its semantics: without an order and head settings. Else a block's mass counts its keys, and
    top-k makes whole steps of attend."""


@dataclass(frozen=True)
class AttendRules(Rules):
    with_pools: bool
    scale: float
    pvthreshd: float
    pv_filter: bool
    causal: bool


@dataclass(frozen=True, eq=False)
class OrderFacts:
    """Tensors of a `TokenOrder` on the kernels' device; all None without an order."""

    slot_tokens: Tensor | None = None
    slot_counts: Tensor | None = None
    head_order_kind: Tensor | None = None
    keys_exact: Tensor | None = None
    queries_exact: Tensor | None = None

    @property
    def order_kinds(self) -> int:
        return 1 if self.slot_tokens is None else self.slot_tokens.shape[0]

    @property
    def slots(self) -> int | None:
        return None if self.slot_tokens is None else self.slot_tokens.shape[1]

    def flat(self) -> list[Tensor | None]:
        """In the order of the fields, for an op's schema."""
        return [
            self.slot_tokens,
            self.slot_counts,
            self.head_order_kind,
            self.keys_exact,
            self.queries_exact,
        ]


NO_ORDER = OrderFacts()

# SPDX-License-Identifier: Apache-2.0
"""Reference as one torch.library op.

What it computes depends on the data, which torch.compile could not trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..blocks import BlockPlan
from ..call import Call
from ..policy import Precision, SparsePolicy
from ..thresholds import COLUMNS
from . import on_reference
from .ops import NAMESPACE
from .rules import FLAT_SCHEMA, Rules

_SCHEMA = (
    "reference(Tensor q, Tensor k, Tensor v, Tensor? key_lengths, Tensor? block_mask, "
    "Tensor? block_map, Tensor? counts, Tensor? thresholds, str select_by, str precision, "
    f"{FLAT_SCHEMA}, float scale, bool causal, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? counters) -> ()"
)


@dataclass(frozen=True)
class _PolicyRules(Rules):
    """The scalars of a policy by their names in `SparsePolicy`."""

    topk: float
    cdfthreshd: float
    simthreshd1: float
    pvthreshd: float
    attention_sink: bool
    keep_diagonal: bool
    exact_prefix: int
    exact_suffix: int
    smooth_k: bool

    @classmethod
    def of(cls, policy: SparsePolicy) -> _PolicyRules:
        """Per-head values travel in ``thresholds``; their number is not read then."""
        values: dict[str, Any] = {}
        for name in cls.__annotations__:
            value = getattr(policy, name)
            values[name] = 1.0 if isinstance(value, Tensor) else value
        return cls(**values)


def run(call: Call, out: Tensor, lse: Tensor | None, counters: Tensor | None) -> None:
    """Runs `on_reference.run` as one node of a traced graph, where there is no order and no head
    settings."""
    if call.order is not None or call.head_settings is not None:
        on_reference.run(call, out, lse, counters)
        return
    policy, plan = call.policy, call.plan
    reference(
        call.q,
        call.k,
        call.v,
        call.key_lengths,
        call.block_mask,
        None if plan is None else plan.block_map,
        None if plan is None else plan.counts,
        call.thresholds,
        policy.select_by,
        policy.precision.value,
        *_PolicyRules.of(policy).flat(),
        call.scale,
        call.is_causal,
        out,
        lse,
        counters,
    )


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    block_mask: Tensor | None,
    block_map: Tensor | None,
    counts: Tensor | None,
    thresholds: Tensor | None,
    select_by: str,
    precision: str,
    numbers: list[int],
    flags: list[bool],
    scalars: list[float],
    scale: float,
    causal: bool,
    out: Tensor,
    lse: Tensor | None,
    counters: Tensor | None,
) -> None:
    values: dict[str, Any] = vars(_PolicyRules.of_flat(numbers, flags, scalars)).copy()
    if thresholds is not None:
        by_head = dict(zip(COLUMNS, thresholds.unbind(1), strict=True))
        values["topk" if select_by == "topk" else "cdfthreshd"] = by_head["selection"]
        values |= {name: by_head[name] for name in ("simthreshd1", "pvthreshd")}
    policy = SparsePolicy(select_by=select_by, precision=Precision(precision), **values)
    plan = None
    if block_map is not None and counts is not None:
        plan = BlockPlan(block_map, counts, q.shape[2], k.shape[2], causal, key_lengths)
    call = Call(
        q, k, v, policy, scale, causal, key_lengths, block_mask, plan, None, None, thresholds
    )
    on_reference.run(call, out, lse, counters)


def _fake(*_: object) -> None:
    return None


def _register() -> torch.library.Library | None:
    if hasattr(getattr(torch.ops, NAMESPACE), "reference"):
        return None
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("reference", _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::reference", _fake, lib=library)
    return library


# The op lives as long as the object that defined it.
_library = _register()
reference = getattr(torch.ops, NAMESPACE).reference

# SPDX-License-Identifier: Apache-2.0
"""Call where no kernel runs: the reference with the same meaning, in float32.

What it computes depends on the data, which torch.compile could not trace: `run` makes it one op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..call import CheckedCall
from ..policy import Precision, SparsePolicy
from ..stats import Counter
from ..thresholds import COLUMNS
from .as_written import as_written
from .ops import NAMESPACE
from .rules import FLAT_SCHEMA, Rules

_SCHEMA = (
    "reference(Tensor q, Tensor k, Tensor v, Tensor? key_lengths, Tensor? block_mask, "
    "Tensor? thresholds, str select_by, str precision, "
    f"{FLAT_SCHEMA}, float scale, bool causal, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? counters) -> ()"
)


def attend(call: CheckedCall) -> tuple[reference.Attended, reference.Route]:
    """Attends, and returns what became of the blocks as well."""
    with as_written(call.q.device):
        return reference.attention(
            call.q,
            call.k,
            call.v,
            call.policy,
            call.head_settings,
            order=call.order,
            is_causal=call.is_causal,
            scale=call.scale,
            key_lengths=call.key_lengths,
            block_mask=call.block_mask,
        )


def compute(
    call: CheckedCall, out: Tensor, lse: Tensor | None, counters: Tensor | None
) -> reference.Route:
    """Writes the results that the kernels would write, and adds to the counters of
    `AttentionStats`; returns what became of the blocks."""
    attended, route = attend(call)
    out.copy_(attended.out)
    if lse is not None:
        lse.copy_(attended.lse)
    if counters is not None:
        counters[Counter.KEPT] += route.kept_pairs().sum()
        counters[Counter.VALID] += route.valid_pairs().sum()
        counters[Counter.PV_SKIPPED] += attended.pv_skipped.sum()
        counters[Counter.KEPT_BLOCKS] += route.kept_blocks().sum()
    return route


def run(call: CheckedCall, out: Tensor, lse: Tensor | None, counters: Tensor | None) -> None:
    """Runs `compute` as one node of a traced graph, where there is no order nor head settings."""
    if call.order is not None or call.head_settings is not None:
        compute(call, out, lse, counters)
        return
    policy = call.policy
    _reference_op(
        call.q,
        call.k,
        call.v,
        call.key_lengths,
        call.block_mask,
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


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    block_mask: Tensor | None,
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
    call = CheckedCall(
        q, k, v, policy, scale, causal, key_lengths, block_mask, None, None, thresholds
    )
    compute(call, out, lse, counters)


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
_reference_op = getattr(torch.ops, NAMESPACE).reference

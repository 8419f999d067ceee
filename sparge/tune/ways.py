# SPDX-License-Identifier: Apache-2.0
"""Which way a call is computed, exact, 8-bit dense or sparse: the fastest by the speed table of its
GPU. Without a table dense calls are exact and sparse ones are as they were asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..kernels import capabilities, pv_filter_saves
from ..policy import PV_FILTER_OFF, SparsePolicy
from ..speed.measuring_cost import UNLIMITED, Afforded, MeasuringCost
from ..speed.table import FEWEST_TOKENS, Size, SpeedTable, Times
from .call import Call

#: Environment variable for debugging: with the value 1 speed does not matter. A device without
#: kernels runs the slow reference, not dense, and no call is dense for being slower.
REFERENCE_VARIABLE = "SPARGE_REFERENCE"
#: Dtypes that tables hold for; exact attention in float32 is slower by far.
MEASURED_DTYPES = (torch.bfloat16, torch.float16)
#: Density that no user asks for.
NO_DENSITY = 0.01

#: Sparse steps of a run where nobody knows how many come.
USUAL_STEPS = 16

#: Gives the speed table of a device; None where there is none.
SpeedOf = Callable[[torch.device], SpeedTable | None]


def speed_matters() -> bool:
    return os.environ.get(REFERENCE_VARIABLE) != "1"


def fitted(policy: SparsePolicy, device: torch.device) -> SparsePolicy:
    """Policy as a device shall run it: without the PV filter where that would only cost exactness;
    unchanged where there are no kernels."""
    arch = capabilities(device).arch
    if not policy.pv_filter or not arch or pv_filter_saves(arch):
        return policy
    return replace(policy, pvthreshd=PV_FILTER_OFF)


def nothing_known(device: torch.device) -> None:
    """A `SpeedOf` of no table."""


@dataclass(frozen=True)
class RunLength:
    """How much of a run may be sparse."""

    layers: int
    sparse_steps: int | None
    """None where nobody knows."""


#: Densities of `Choice.break_even` where sparse calls are never slower, or nothing is known.
NEVER = math.inf, math.inf


@dataclass(frozen=True)
class Choice:
    """Choice between the ways for calls of one kind: what the speed table says of them."""

    tokens: int
    eight_bit_dense: bool = False
    """Whether dense ones are to be computed in 8 bits."""
    exact_seconds: float | None = None
    """Seconds of an exact one, all entries of its batch; None where nothing is known."""
    break_even: tuple[float, float] = NEVER
    """Densities from which on sparse ones are slower: without pooled keys, and with them. All heads
    count as pooled then: that is 1/64 of a dense call."""

    def why_slower(self, pools: bool) -> str:
        """Why a call is dense that would keep so many pairs that sparse is slower. The text holds
        nothing that differs between layers: the report counts it."""
        break_even = self.break_even[pools]
        if break_even < NO_DENSITY:
            return f"at {self.tokens:,} tokens sparse would be slower"
        share = f"{100 * break_even:.0f} % density"
        return f"at {self.tokens:,} tokens sparse is faster only below {share}"


@dataclass(frozen=True)
class Ways:
    """Choice between the ways for the calls of a run."""

    speed: SpeedOf = nothing_known
    exact_dense: bool = True
    """Dense calls are exact even where 8-bit dense would be faster."""
    even_if_slower: bool = False
    """Calls are sparse, and heads measured, even where that is slower."""

    def choice(self, call: Call) -> Choice:
        """Choice for all calls of the kind of this one."""
        times = self._times(call)
        if times is None:
            return Choice(call.query_tokens)
        exact = times.exact.seconds(call.size) if call.by_backend else None
        break_even = NEVER
        if not self.even_if_slower:
            size, dense = _size_of_entry(call), self._dense_seconds(call, times)
            dropped, pooled = (times.sparse_density_within(size, dense, x) for x in (0.0, 1.0))
            break_even = dropped, pooled
        return Choice(call.query_tokens, self._is_eight_bit(call, times), exact, break_even)

    def affordable(
        self,
        call: Call,
        most: int,
        *,
        run: RunLength,
        conditionings: int,
        calls: int,
        least: float,
    ) -> Afforded:
        """How much of a run is measured, one of its measurements in this dense call: all, with
        `most` token orders, where nothing is known.

        conditionings: each is measured in each of the layers. calls: that each measurement counts
        for, as in `MeasuringCost`. least: share of pairs that no call goes below.
        """
        times = None if self.even_if_slower else self._times(call)
        if times is None or call.shares_keys:  # heads that share keys measure one order anyway
            return Afforded(most, again=UNLIMITED)
        size, measurements = _size_of_entry(call), run.layers * conditionings
        dense = self._dense_seconds(call, times)
        cost = MeasuringCost(times.sparse, size, dense, calls)
        steps = USUAL_STEPS if run.sparse_steps is None else run.sparse_steps
        saved = steps * (dense - times.sparse_seconds(size, least, pooled=1.0))
        afforded = cost.affordable(
            most, saved=saved, measurements=measurements, conditionings=conditionings
        )
        if run.sparse_steps is None:
            return afforded
        heads = run.layers * call.head_count
        return replace(
            afforded, pays=cost.pays(heads=heads, measurements=measurements, saved=saved)
        )

    def _times(self, call: Call) -> Times | None:
        """Times that a call follows; None where nothing is known."""
        if call.query_tokens < FEWEST_TOKENS or call.q.dtype not in MEASURED_DTYPES:
            return None
        table = self.speed(call.q.device) if speed_matters() else None
        return None if table is None else table.of(call.head_dim)

    def _dense_seconds(self, call: Call, times: Times) -> float:
        way = times.eight_bit if self._is_eight_bit(call, times) else times.exact
        return way.seconds(_size_of_entry(call))

    def _is_eight_bit(self, call: Call, times: Times) -> bool:
        if self.exact_dense or not call.by_backend or call.k.shape[2] != call.query_tokens:
            return False
        return times.eight_bit_is_faster(_size_of_entry(call))


def _size_of_entry(call: Call) -> Size:
    """Size of one entry of a batch: a host computes entries together or one by one, as memory
    allows, and the result must not depend on it."""
    return Size(call.query_tokens, call.head_count, call.head_dim)

# SPDX-License-Identifier: Apache-2.0
"""Cost of a measurement of heads, and how many token orders it may measure.

It follows from sizes alone, nothing is timed, so that the choices of a run are the same in every
one. With H heads of one batch entry, N tokens, and so many token orders (`orders`):

    measurement = once + orders (launch + token H N)

on the GPU, and likewise on the host. Where the host takes longer than the dense call and the GPU,
the GPU waits. The rates are beside those of calls in rates.json, from `python -m
benchmarks.rates measurements --fit`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Share of the attention time of all dense calls that measuring heads may take: measuring is to
#: make a run faster, and where few steps are dense or they are short it would eat up the gain.
SHARE = 0.02
#: Seconds that measuring may take in any case, in all layers and conditionings of one text length
#: together: nobody notices them in a run (docs/experiments.md, Measuring one order alone).
ALWAYS = 0.1
#: Seconds that a faster exact kernel of the measured calls has to save in a run
#: (docs/experiments.md, Planning time of cuDNN).
WORTH_A_PLAN = 0.1
#: Share of a measurement that the query blocks of a second one add to it: keys and values are
#: prepared once.
MORE_BLOCKS = 0.5
#: Number of measurements where nothing limits them.
UNLIMITED = sys.maxsize
#: Measurements that one among the sparse steps counts for (`StepSettings`): of cond alone, as many
#: query blocks as of cond and uncond before.
AGAIN_CALLS = 2

#: Seconds in which the host chooses for one head when a run's first sparse step begins, and the GPU
#: waits (docs/experiments.md, Host time of a choice).
CHOOSING = 6e-5


@dataclass(frozen=True)
class MeasuringRates:
    """Rates in seconds, of one kind of GPU and one head_dim: each is a part of the formula
    above.
    """

    once: float
    launch: float
    token: float
    host: MeasuringRates | None = None
    """Rates of the host, which queues some hundred launches for a measurement and may take longer
    than the GPU (docs/experiments.md, Host time of a measurement)."""

    @classmethod
    def read(cls, fields: Mapping[str, Any] | None) -> MeasuringRates | None:
        if fields is None:
            return None
        return cls(**{**fields, "host": cls.read(fields.get("host"))})

    def seconds(
        self, rows: int, order_kinds: int, calls: int = 1, dense: float = math.inf
    ) -> float:
        """Seconds by which a measurement makes a dense call longer.

        rows: heads times tokens. calls: number of usual measurements whose query blocks it covers.
        dense: seconds of the call, in which the GPU does not wait for the host.
        """
        terms = measuring_terms(rows, order_kinds)
        alone = sum(getattr(self, name) * times for name, times in terms.items())
        waiting = 0.0 if self.host is None else self.host.seconds(rows, order_kinds) - dense
        return max(alone * (1 + MORE_BLOCKS * (calls - 1)), waiting)


@dataclass(frozen=True)
class Afforded:
    """Extent of measuring that the dense calls of a run afford."""

    order_kinds: int
    """Token orders that each measurement covers."""
    again: int
    """Times that heads can be measured once more among the sparse steps."""
    pays: bool = True
    """False where measuring takes longer than all sparse calls can save."""
    by_faster_kernel: bool = False
    """Whether measured calls are served by a faster exact kernel, which pays for measuring."""


def measuring_terms(rows: int, order_kinds: int) -> dict[str, float]:
    """Factor of each rate of `MeasuringRates`."""
    return {"once": 1.0, "launch": order_kinds, "token": order_kinds * rows}


def affordable(
    rates: MeasuringRates,
    rows: int,
    most: int,
    *,
    dense: float,
    steps: int = 1,
    measurements: int,
    conditionings: int = 1,
    calls: int = 1,
    shorter: float = 0.0,
) -> Afforded:
    """Returns what a run affords to measure.

    Token orders come first: as many of `most` as keep a measurement within SHARE of the dense calls
    that its conditioning makes in its layer, plus what its own is shorter than they, or else all
    measurements of the run within ALWAYS; but at least one, which may take more than either. Then
    come as many measurements among the sparse steps as are within the same together with the first
    ones.

    Token orders are what to save on. A measurement's cost grows with them as with nothing else;
    fewer query blocks predict worse, and an order that is not measured is one that no head takes,
    no more.

    dense: seconds of each of those calls. steps: how many they are. shorter: seconds by which the
    measured one is shorter where a faster kernel serves it, if that saves more than WORTH_A_PLAN in
    the run. measurements: number of the first ones of the run, in all layers and conditionings.
    rows and calls: as in `MeasuringRates.seconds`.
    """
    faster = shorter * measurements > WORTH_A_PLAN
    allowed = max(SHARE * steps * dense + faster * shorter, ALWAYS / measurements)
    within = (w for w in range(most, 1, -1) if rates.seconds(rows, w, calls, dense) <= allowed)
    order_kinds = next(within, 1)
    first = rates.seconds(rows, order_kinds, calls, dense)
    more = rates.seconds(rows, order_kinds, AGAIN_CALLS, dense) / conditionings
    again = min(max(0.0, (allowed - first) / more), UNLIMITED)  # allowed may be infinite
    return Afforded(order_kinds, int(again), by_faster_kernel=faster)


def pays(
    rates: MeasuringRates,
    rows: int,
    *,
    heads: int,
    measurements: int,
    calls: int,
    dense: float,
    saved: float,
    steps: int,
) -> bool:
    """Whether the least that a run can measure, and its choice from it, take no longer than its
    sparse steps save.

    heads: of all layers. measurements: number of those of one step, in all layers and
    conditionings. saved: seconds by each of its calls. rows, calls and dense: as in
    `MeasuringRates.seconds`.
    """
    cost = measurements * rates.seconds(rows, 1, calls, dense) + heads * CHOOSING
    return cost <= measurements * saved * steps

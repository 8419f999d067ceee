# SPDX-License-Identifier: Apache-2.0
"""What a sample of calibration costs, and how many walks it may measure: from sizes alone, nothing
is timed, so that the choices of a run are the same in every one.

With H heads of one batch entry, N tokens, and so many walks:

    sample = once + walks (launch + token H N)

The rates are beside those of calls in rates.json, from `python -m benchmarks.sample_cost --fit`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Of the attention time of all dense calls, that measuring heads may take: what is measured is to
#: make a run faster, and where few steps are dense or they are short it would eat up the gain.
SHARE = 0.02
#: Seconds that measuring may take in any case, in all layers and conditionings of one text length
#: together: nobody notices them in a run, but clips of the small video DiT lie up to .7 dB further
#: from dense ones where only one walk is measured.
ALWAYS = 0.1
#: Seconds that a faster exact kernel of the measured calls has to save in a run: cuDNN takes .04 to
#: .08 s to plan a new shape, once a process, and up to .9 s to read its libraries from a disk.
WORTH_A_PLAN = 0.1
#: What the query blocks of a second sample add to one, as a share of it: keys and values are
#: prepared once.
MORE_BLOCKS = 0.5
#: Samples, where nothing limits them.
UNLIMITED = sys.maxsize
#: Samples that one among the sparse steps counts for (`StepChoices`): of cond alone, as many query
#: blocks as of cond and uncond before.
AGAIN_CALLS = 2

#: Seconds in which the host chooses for one head when a run's first sparse step begins, and the GPU
#: waits: .09 s (Flux) to .22 s (CogVideoX-5B) on the host of an H200, .7 to 1.1e-4 a head.
CHOOSING = 1e-4


@dataclass(frozen=True)
class SampleRates:
    """Seconds, of one kind of GPU and one head_dim: each is a part of the formula above."""

    once: float
    launch: float
    token: float

    @classmethod
    def read(cls, fields: Mapping[str, Any] | None) -> SampleRates | None:
        return None if fields is None else cls(**fields)

    def seconds(self, rows: int, walks: int, calls: int = 1) -> float:
        """rows: heads times tokens. calls: as many query blocks as so many samples measure."""
        terms = sample_terms(rows, walks)
        alone = sum(getattr(self, name) * times for name, times in terms.items())
        return alone * (1 + MORE_BLOCKS * (calls - 1))


@dataclass(frozen=True)
class Afforded:
    """What the dense calls of a run afford."""

    walks: int
    """That each sample measures."""
    again: int
    """Times that heads can be measured once more among the sparse steps."""
    pays: bool = True
    """False where measuring takes longer than all sparse calls can save."""
    by_faster_kernel: bool = False
    """Whether measured calls are served by a faster exact kernel, which pays for measuring."""


def sample_terms(rows: int, walks: int) -> dict[str, float]:
    """What each of `SampleRates` is multiplied by."""
    return {"once": 1.0, "launch": walks, "token": walks * rows}


def affordable(
    rates: SampleRates,
    rows: int,
    most: int,
    *,
    dense: float,
    samples: int,
    conditionings: int = 1,
    calls: int = 1,
    shorter: float = 0.0,
) -> Afforded:
    """As many of `most` walks as keep a sample within SHARE of the dense calls that its
    conditioning makes in its layer and what its own is shorter than they, or else all samples of
    the run within ALWAYS; but at least one, which may take more than either. Then as many samples
    among the sparse steps as are within the same with the first ones.

    Walks are what to save on. A sample's cost grows with them as with nothing else; fewer query
    blocks predict worse, and a walk that is not measured is one that no head takes, no more.

    dense: seconds of those calls. shorter: by so many the measured one is where a faster kernel
    serves it, if that saves more than WORTH_A_PLAN in the run. samples: the first ones of the run,
    in all layers and conditionings. rows and calls: as in `SampleRates.seconds`.
    """
    faster = shorter * samples > WORTH_A_PLAN
    allowed = max(SHARE * dense + faster * shorter, ALWAYS / samples)
    within = (w for w in range(most, 1, -1) if rates.seconds(rows, w, calls) <= allowed)
    walks = next(within, 1)
    first = rates.seconds(rows, walks, calls)
    more = rates.seconds(rows, walks, AGAIN_CALLS) / conditionings
    again = min(max(0.0, (allowed - first) / more), UNLIMITED)  # allowed may be infinite
    return Afforded(walks, int(again), by_faster_kernel=faster)


def pays(
    rates: SampleRates, rows: int, *, heads: int, samples: int, calls: int, saved: float, steps: int
) -> bool:
    """Whether the least that a run can measure, and the first choice from it, take no longer than
    its sparse steps save. Later choices and probes come on top, but so do savings of samplers that
    evaluate the model twice a step.

    heads: of all layers. samples: those of one step, in all layers and conditionings. saved:
    seconds by each of its calls. rows and calls: as in `SampleRates.seconds`.
    """
    cost = samples * rates.seconds(rows, 1, calls) + heads * CHOOSING
    return cost <= samples * saved * steps

# SPDX-License-Identifier: Apache-2.0
"""Settings of a run, and its steps: which are dense, how densities fall, and when heads are chosen
anew."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..checks.argument import check_kind, flag, number, shown, whole_number
from ..kernels import capabilities, pv_filter_saves
from ..policy import PV_FILTER_OFF, SparsePolicy
from ..reasons import Reason
from .tokens import LayerSpans

#: Relative distance within which two noise levels are the same. A step often falls exactly on the
#: edge (20 steps, start_percent 0.2), where the float32 schedule and the float64 edge differ in the
#: last bits: this is above that, below a step.
SAME_SIGMA = 1e-5
#: Steps between two choices where nobody knows how many come.
UNKNOWN_STEPS = 16
#: Choices in a run, at most.
CHOICES = 3


@dataclass(frozen=True)
class Aim:
    """Target for the mean error of the heads in each sparse step, or else a mean density over all
    heads and steps."""

    kind: str
    """Name of the aim: "quality" or "budget"."""
    value: float

    def __post_init__(self) -> None:
        if self.kind not in ("quality", "budget"):
            raise ValueError(f'kind is {shown(self.kind)}; an aim is "quality" or "budget".')
        if not 0 <= number("value", self.value) <= 1:  # NaN is not either
            raise ValueError(f"value is {self.value}; an error or a density is from 0 to 1.")

    def __str__(self) -> str:
        if self.kind == "quality":
            return f"a mean error of {self.value:g}"
        return f"a mean density of {100 * self.value:g} %"


# These texts are in saved graphs of ComfyUI: only append. A new node starts with the first.
AUTO_QUALITY = "auto quality"
AUTO_BUDGET = "auto budget"
MANUAL = "manual"
MODES = [AUTO_QUALITY, AUTO_BUDGET, MANUAL]
#: Target errors: mean relative L2 error of the heads' outputs, each by its head weight
#: (docs/experiments.md, Targets of the qualities).
QUALITIES = {"high": 0.03, "balanced": 0.05, "fast": 0.08}


@dataclass(frozen=True)
class Settings:
    """Settings of one run, in the order of the node's widgets; what a mode does not use has its
    default."""

    mode: str = MANUAL
    quality: str | float = "balanced"
    topk: float = 0.5
    pvthreshd: float = 50.0  # off
    select_by: str = "topk"
    cdfthreshd: float = 0.98
    simthreshd1: float = -0.1
    start_percent: float = 0.2
    end_percent: float = 1.0
    min_tokens: int = 4096
    dense_blocks: str = ""
    exact_dense: bool = False

    def __post_init__(self) -> None:
        """Checks the values where a run is asked for, not steps later. Raises ValueError."""
        for name, options in (("mode", MODES), ("quality", list(QUALITIES))):
            given = getattr(self, name)
            is_number = name == "quality" and not isinstance(given, str)
            if given not in options and not (is_number and 0 <= number(name, given) <= 1):
                error = ", or a mean error from 0 to 1" if name == "quality" else ""
                raise ValueError(f"{name} is {shown(given)}; it takes one of {options}{error}.")
        for name in ("topk", "start_percent", "end_percent"):
            value = getattr(self, name)
            if not 0 <= number(name, value, "a number from 0 to 1") <= 1:
                raise ValueError(f"{name} is {value}; it takes a number from 0 to 1.")
        whole_number("min_tokens", self.min_tokens, 0)
        flag("exact_dense", self.exact_dense)
        check_kind("dense_blocks", self.dense_blocks, str, 'a text of block numbers, say "0-2, -1"')
        self.policy()
        LayerSpans.parse(self.dense_blocks)

    @cached_property
    def aim(self) -> Aim | None:
        """Aim for measured heads; None in manual mode, which measures nothing."""
        if self.mode == AUTO_QUALITY:
            asked = self.quality
            return Aim("quality", QUALITIES[asked] if isinstance(asked, str) else asked)
        return Aim("budget", self.topk) if self.mode == AUTO_BUDGET else None

    @cached_property
    def dense_layers(self) -> LayerSpans:
        return LayerSpans.parse(self.dense_blocks)

    def policy(self) -> SparsePolicy:
        """Policy without the text, which calls have in different places."""
        return SparsePolicy(
            # A measured head keeps a share of the blocks, never one of the mass.
            select_by="topk" if self.aim else self.select_by,
            topk=self.topk,
            cdfthreshd=self.cdfthreshd,
            simthreshd1=self.simthreshd1,
            pvthreshd=self.pvthreshd,
        )


def fitted(policy: SparsePolicy, device: torch.device) -> SparsePolicy:
    """Policy as a device shall run it: without the PV filter where that would only cost exactness;
    unchanged where there are no kernels."""
    arch = capabilities(device).arch
    if not policy.pv_filter or not arch or pv_filter_saves(arch):
        return policy
    return replace(policy, pvthreshd=PV_FILTER_OFF)


@dataclass(frozen=True)
class Step:
    """Sampling step of a forward pass, as it is known when the pass begins."""

    prompts: tuple[int, ...]
    """Number of the prompt of each entry of the batch, 0 for the positive one."""
    number: int
    why_dense: Reason | None = None
    """Why the whole pass has to stay dense; None where it may be sparse."""
    is_last_dense: bool = False
    """It is the last dense step before the sparse ones."""
    index: int | None = None
    """Index among the steps that may be sparse, by noise level; None where that is not known."""
    of_sparse: int | None = None
    """Number of steps that may be sparse, likewise."""
    model: int = 0
    """Number of the model, where a run evaluates several: 0 is the one that is sampled."""

    def index_since(self, first: Step) -> int:
        """Number of steps from another pass to this one, by noise level where that is known: a step
        may evaluate the model more than once."""
        if first.index is None or self.index is None:
            return self.number - first.number
        return self.index - first.index


def budgets(mean: float, steps: int, least: float = 0.0) -> list[float]:
    """Densities of the sparse steps, whose mean is `mean`; a single one where all are equal. Later
    steps build on what an early step gets wrong (docs/experiments.md, Density over the sampling
    steps).

    The first step gets 0.6 times the mean more at 10 %, 0.3 times at 30 % and nothing at 50 %, the
    last one less. least: share that is kept whatever is chosen; only what is above it can fall.
    """
    fall = max(0.0, 0.75 * (1 - 2 * mean)) * (mean - least)
    if steps < 2 or fall <= 0:
        return [mean]
    return [mean + fall * (1 - 2 * step / (steps - 1)) for step in range(steps)]


def next_choice(step: int, steps: int | None, left: int) -> int | None:
    """Sparse step where heads are chosen anew after a choice in this one, of so many; None where
    none follows. The last step alone gets none. left: choices to come."""
    interval = UNKNOWN_STEPS if steps is None else -(-steps // CHOICES)
    following = step + interval
    return following if left and (steps is None or following < steps - 1) else None


@dataclass(frozen=True)
class SigmaWindow:
    """Range of noise levels in which attention may be sparse; sigma falls while sampling."""

    start: float = math.inf
    end: float = 0.0
    start_percent: float = 0.0
    """Edge as a user gives it; below likewise."""
    end_percent: float = 1.0

    @property
    def is_everything(self) -> bool:
        return self.start == math.inf and self.end == 0.0

    @classmethod
    def of(cls, settings: Settings, to_sigma: Callable[[float], float]) -> SigmaWindow:
        """Turns percent into sigma.

        The edges 0 and 1 are open: model samplings disagree about the sigma they give them.
        """
        first, last = settings.start_percent, settings.end_percent
        start = float(to_sigma(first)) if first > 0 else math.inf
        end = float(to_sigma(last)) if last < 1 else 0.0
        return cls(start, end, first, last)

    def step(self, step: Step, sigma: float, schedule: Sequence[float]) -> Step:
        """Step at a noise level, with what follows from that."""
        inside = [x for x in schedule if not self._is_before(x) and not self._is_after(x)]
        above = sum(level > sigma * (1 + SAME_SIGMA) for level in inside)
        return replace(
            step,
            why_dense=self.outside_reason(sigma),
            is_last_dense=self.is_last_dense(sigma, schedule),
            index=min(above, len(inside) - 1) if inside else None,
            of_sparse=len(inside) or None,
        )

    def outside_reason(self, sigma: float) -> Reason | None:
        start, end = self.start_percent, self.end_percent
        if start > end:
            return Reason(
                f"start_percent {start:g} is above end_percent {end:g}, so no step is between them",
                "between",
            )
        if self._is_before(sigma):
            return Reason(f"before start_percent {start:g}", "before")
        return Reason(f"after end_percent {end:g}", "after") if self._is_after(sigma) else None

    def is_last_dense(self, sigma: float, schedule: Sequence[float]) -> bool:
        """Whether sigma is before the window and no step of the schedule lies between.

        It goes by noise level and not by counting passes: right wherever a sampler evaluates the
        model.
        """
        if self.start < self.end:  # no step is in the window
            return False
        below = sigma * (1 - SAME_SIGMA)
        later = any(level < below and self._is_before(level) for level in schedule)
        return self._is_before(sigma) and not later

    def _is_before(self, sigma: float) -> bool:
        return sigma > self.start * (1 + SAME_SIGMA)

    def _is_after(self, sigma: float) -> bool:
        return sigma < self.end * (1 - SAME_SIGMA)


#: Window of a run whose steps may all be sparse.
EVERYTHING = SigmaWindow()


class Progress:
    """Progress of one run by noise levels: samplers may evaluate the model more than once a
    step."""

    def __init__(self, schedule: Sequence[float], show: Callable[[str], None]) -> None:
        """schedule: noise level of each step; nothing is shown where that is not known. show: takes
        the line."""
        self._schedule, self._show = schedule, show
        self._step, self._since = -1, 0.0

    def at(self, sigma: float) -> None:
        """Notes that a pass begins at this noise level."""
        step = sum(level >= sigma * (1 - SAME_SIGMA) for level in self._schedule) - 1
        if step <= self._step:
            return
        before, since = self._step, self._since
        self._step, self._since = step, time.perf_counter()
        if before >= 0:
            seconds, steps = (self._since - since) / (step - before), len(self._schedule)
            left = seconds * (steps - step)
            self._show(
                f"Step {step + 1} of {steps}: {seconds:.1f} s a step, about {left:.0f} s left"
            )

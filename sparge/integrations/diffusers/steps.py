# SPDX-License-Identifier: Apache-2.0
"""Steps of one call of a pipeline, and which prompts a pass is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

#: What pipelines make of the scheduler's timesteps, for models without a row.
_FORMS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda values: values,
    lambda values: values / 1000,
    lambda values: 1 - values / 1000,
)
#: Share of the largest timestep that one may be off by, for what a 16-bit format makes of it.
_ROUNDING = 0.01

#: Numbers of prompts by the name that a pipeline gives a pass (`cache_context`). Of a batch the
#: first half is that of the negative prompt.
COND, UNCOND = (0,), (1,)
BATCH = (1, 0)


class Steps:
    """Steps of one schedule, counted by the timesteps that passes are given.

    A pass of the same timestep belongs to the same step, unless its prompt had its pass already and
    the schedule has that timestep again (schedulers of second order do).
    """

    def __init__(self, timesteps: Tensor) -> None:
        """timesteps: of the scheduler. Waits for their device."""
        self._timesteps = timesteps  # the very object: a scheduler makes one for each call
        self._values = timesteps.detach().cpu()
        self._given: Tensor | None = None  # (steps,) float64, what passes are given
        self.are_known = True
        """Whether the steps of passes can be told by what they are given."""
        self._seen: set[int] = set()
        self.now = -1
        """Number of the running step."""

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_last(self) -> bool:
        return self.now == len(self) - 1

    def are_of(self, timesteps: object) -> bool:
        """Whether these are the steps of a scheduler's timesteps."""
        return timesteps is self._timesteps

    def advance(self, timestep: Tensor, scale: float | None, prompts: tuple[int, ...]) -> bool:
        """Takes note of a pass. Waits for the timestep, a single number. Returns False, and does
        nothing, where its step lies behind: then another call of the pipeline has begun.

        scale: what the pipeline divides timesteps by; None where the first pass has to show it.
        """
        if self._given is None:
            self._given, self.are_known = _given(self._values, timestep, scale)
        if not self.are_known:
            return True
        distance = (self._given - _latest(timestep)).abs()
        places = (distance == distance.min()).nonzero().flatten().tolist()
        repeated = self._seen.intersection(prompts)
        later = [place for place in places if place > self.now]
        if self.now in places and not (repeated and later):
            self._seen.update(prompts)
            return True
        if not later:
            return False
        self.now, self._seen = later[0], set(prompts)
        return True


def _given(values: Tensor, timestep: Tensor, scale: float | None) -> tuple[Tensor, bool]:
    """(steps,) float64, what passes are given of a schedule's timesteps, and whether the first
    `timestep` is among them."""
    # Cast as the pipeline casts them, or neighbours in bf16 would be mistaken.
    values = values.to(timestep.dtype)
    if scale is not None:
        return (values / scale).double(), True
    forms = [form(values.double()) for form in _FORMS]
    nearest = []
    for form in forms:
        # Of a single step the last form is 0.
        off = (form - _latest(timestep)).abs() / form.abs().max().clamp(min=_ROUNDING)
        nearest.append((float(off.min()), int(off.argmin())))
    least = min(nearest)  # of equals that of the earlier step: schedules may end at 1
    return forms[nearest.index(least)], least[0] <= _ROUNDING


def _latest(timestep: Tensor) -> float:
    """Timestep of the tokens that are sampled; given ones, such as a first frame, have 0."""
    return float(timestep.max())


class Prompts:
    """Numbers of the prompts of passes, over one call of a pipeline."""

    def __init__(self, pipe: Any) -> None:
        self._guided = _is_guided(pipe)
        self._others: dict[str, int] = {}

    def of(self, name: str | None, batch: int) -> tuple[int, ...]:
        """Prompts of a pass of so many batch entries. name: that of the pass, None without one."""
        if name == "cond":
            return COND
        if name == "uncond":
            return UNCOND
        if name is None or name == "cond_uncond":
            return BATCH if self._guided and batch % 2 == 0 else COND
        return (self._others.setdefault(name, 2 + len(self._others)),)


def _is_guided(pipe: Any) -> bool:
    """Whether a pipeline puts the negative prompt into the batch, where it says nothing of it in
    the name of a pass."""
    flag = getattr(pipe, "do_classifier_free_guidance", None)
    if flag is not None:
        return bool(flag)
    return (getattr(pipe, "guidance_scale", None) or 1.0) > 1.0

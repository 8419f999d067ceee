# SPDX-License-Identifier: Apache-2.0
"""Steps of one call of a pipeline, and which prompts a pass is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...reasons import Reason

NO_SCHEDULE = Reason("the scheduler has no timesteps, so the step is not known")
NOT_OF_SCHEDULE = Reason("the model is given no timestep of the scheduler, so none is known")

#: What pipelines make of the scheduler's timesteps for their models.
_FORMS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda values: values,
    lambda values: values / 1000,
    lambda values: 1 - values / 1000,
)
#: The same where noise is larger than the picture (Cosmos Predict2): its part of both.
_PART: tuple[Callable[[Tensor], Tensor], ...] = (lambda values: values / (values + 1000),)
#: Share of the largest timestep that one may be off by, for what a 16-bit format makes of it.
_ROUNDING = 0.01

#: Numbers of prompts. Of a batch the first half is that of the negative prompt.
COND, UNCOND = (0,), (1,)
BATCH = (*UNCOND, *COND)


class Steps:
    """Steps of one schedule, counted by the timesteps that passes are given.

    A pass of the same timestep belongs to the same step, unless its prompt had its pass already and
    the schedule has that timestep again (schedulers of second order do).
    """

    def __init__(self, timesteps: object) -> None:
        """timesteps: of the scheduler. Waits for their device."""
        self.timesteps = timesteps
        """The scheduler's own object, which it makes anew for each call of a pipeline."""
        known = isinstance(timesteps, Tensor)
        self._values = timesteps.detach().cpu() if known else torch.empty(0)
        self._given: Tensor | None = None  # (steps,) float64, what passes are given
        self.unknown = None if known else NO_SCHEDULE
        """Why the steps of passes cannot be told by what they are given; None where they can."""
        self._seen: set[int] = set()
        self.now = -1
        """Number of the running step."""

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_last(self) -> bool:
        return self.unknown is not None or self.now == len(self) - 1

    def advance(self, timestep: Tensor, prompts: tuple[int, ...]) -> bool:
        """Takes note of a pass. Waits for the timestep, a single number. Returns False, and does
        nothing, where its step lies behind: then another call of the pipeline has begun."""
        if self.unknown is not None:
            return True
        # Of the tokens that are sampled; given ones, such as a first frame, have 0.
        latest = float(timestep.max())
        if self._given is None:
            self._given, is_near = self._form(timestep, latest)
            if not is_near:
                self.unknown = NOT_OF_SCHEDULE
                return True
        distance = (self._given - latest).abs()
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

    def _form(self, timestep: Tensor, latest: float) -> tuple[Tensor, bool]:
        """Timesteps as passes are given them, which the first one shows, and whether it is among
        them."""
        # Cast as the pipeline casts them, or neighbours in bf16 would be mistaken.
        values = self._values.to(timestep.dtype).double()
        nearest = []
        forms = _PART if latest <= 1 and values.max() > 1000 * (1 + _ROUNDING) else _FORMS
        for number, form in enumerate(made := [form(values) for form in forms]):
            # Of a single step the last form is 0.
            off = (form - latest).abs() / form.abs().max().clamp(min=_ROUNDING)
            # Of forms that are equally near that of the earlier step: schedules may end at 1.
            nearest.append((float(off.min()), int(off.argmin()), number))
        least, _, number = min(nearest)
        return made[number], least <= _ROUNDING


class Prompts:
    """Numbers of the prompts of passes, over one call of a pipeline."""

    def __init__(self, pipe: Any) -> None:
        # Whether the negative prompt is put into the batch, where a pass has no name that says so.
        flag = getattr(pipe, "do_classifier_free_guidance", None)
        self._guided = (
            (getattr(pipe, "guidance_scale", None) or 1.0) > 1.0 if flag is None else flag
        )
        self._known = {"cond": COND, "uncond": UNCOND}

    def of(self, name: str | None, batch: int) -> tuple[int, ...]:
        """Prompts of a pass of so many batch entries. name: what the pipeline calls the pass
        (`cache_context`), None for nothing."""
        if name is None or name == "cond_uncond":
            return BATCH if self._guided and batch % 2 == 0 else COND
        return self._known.setdefault(name, (len(self._known),))

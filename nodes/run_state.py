# SPDX-License-Identifier: Apache-2.0
"""State of one run in ComfyUI. It is made when the run starts and dropped at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..sparge.session import Progress, Session, SigmaWindow
from .host import exact_attention, exact_backend, untracked_allocations
from .layer_counter import ReplacedBlocks
from .override_check import Override, OverrideChecks
from .settings import Settings
from .words import WORDS


def _ignored(text: str) -> None:
    """Shows nothing."""


class Run(Session):
    """State of one run, shared by its forward passes on every device."""

    def __init__(
        self,
        settings: Settings,
        model_sampling: Any,
        owner: object,
        schedule: Sequence[float] = (),
        model: object = None,
        device: torch.device | None = None,
        show: Callable[[str], None] = _ignored,
    ) -> None:
        """Starts a run. schedule: noise level of each step, as far as it is known. model, device:
        what is sampled, and where. show: shows a line under the
        node."""
        to_sigma = model_sampling.percent_to_sigma  # in force when sampling starts
        super().__init__(
            settings,
            SigmaWindow.of(settings.start_percent, settings.end_percent, to_sigma),
            schedule,
            exact=exact_backend(),
            words=WORDS,
            untracked=untracked_allocations,
        )
        self.owner = owner
        self.backend_function: str = getattr(exact_attention(), "__name__", "")
        """Name of the function that times of exact calls are of."""
        self.replaced_blocks = ReplacedBlocks()
        self.overrides: dict[int, tuple[Override, Override]] = {}
        """Overrides of passes by id, each with what the pass gets in its place."""
        self.override_checks = OverrideChecks(self.failures)
        falls = settings.aim is not None and settings.aim.kind == "budget"
        self.needs_level = falls or not self.window.is_everything
        """Whether a pass has to know its noise level, for which it waits."""
        self.progress = Progress(schedule, show)
        self._model, self._device = model, device
        self._step = 0
        self._evaluated = False
        self._of_step: set[int] = set()  # prompts of a step, where nobody counts evaluations
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> Run:
        """Itself: other nodes copy the options of a run deeply, and its state is one."""
        return self

    def begin_evaluation(self) -> None:
        """Begins an evaluation of the model. It counts as a step whatever passes ComfyUI splits it
        into: those follow from the free memory, and the result must not."""
        with self._lock:
            self._step += self._evaluated
            self._evaluated = True

    def step_of(self, prompts: tuple[int, ...]) -> int:
        """Number of the step that a pass belongs to which begins.

        A pack that samples past ComfyUI's guiders begins no evaluation: there, a step is over when
        one of its prompts comes again.
        """
        with self._lock:
            if not self._evaluated:
                if self._of_step.intersection(prompts):
                    self._step += 1
                    self._of_step.clear()
                self._of_step.update(prompts)
            return self._step

    def which(self, model: object, device: torch.device) -> int:
        """Number of the model that a pass is of: 0 for what is sampled, wherever it was copied to
        (multi-GPU); else a number for another model, which a guider runs beside it on its device
        (DualModelGuider)."""
        if self._model is None or model is self._model or device != self._device:
            return 0
        apart = ", and its heads are measured apart" if self.settings.aim else ""
        self.note(
            "the guider runs a second model as well: it follows the settings of this node, "
            f"whatever nodes it went through{apart}"
        )
        return id(model)  # id of objects that outlive the run

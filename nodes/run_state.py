# SPDX-License-Identifier: Apache-2.0
"""State of one sampling run. It is made when the run starts and dropped at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from ..sparge import capabilities
from ..sparge.common.failures import Failures
from ..sparge.speed import known_table
from ..sparge.tune import Conditioning, Fingerprint, Profile, Progress, Session, SigmaWindow, Tally
from ..sparge.tune.ways import speed_matters
from .host import exact_backend, untracked_allocations
from .layer_counter import ReplacedBlocks
from .live_map import LiveMap
from .result import RunResult
from .settings import Settings

#: Remark where sparse calls came before, so that nothing tells whose doing it is.
NOT_FINITE_LATER = (
    "NaN or inf came into attention in sparse steps: bypass this node and run the same seed to "
    "see whether the model gives them by itself"
)


def _ignored(text: str) -> None:
    """Shows nothing."""


class Run:
    """State of one run, shared by its forward passes on every device."""

    def __init__(
        self,
        settings: Settings,
        model_sampling: Any,
        owner: object,
        profile: Profile | None = None,
        schedule: Sequence[float] = (),
        model: object = None,
        device: torch.device | None = None,
        profile_name: str = "",
        show: Callable[[str], None] = _ignored,
        node_id: str | None = None,
        maps_of: Collection[int] = (),
    ) -> None:
        """Starts a run. schedule: noise level of each step, as far as it is known. model, device:
        what is sampled, and where. profile_name: as the user knows it. show: shows a line under the
        node. node_id: of our node, in the running graph. maps_of: layers whose block
        maps are kept."""
        self.owner = owner
        self.settings = settings
        self.asked = settings.policy()
        """Policy for any device; `sparge.tune.fitted` makes it one's own."""
        to_sigma = model_sampling.percent_to_sigma  # in force when sampling starts
        self.window = SigmaWindow.of(settings.start_percent, settings.end_percent, to_sigma)
        self.schedule = schedule
        self.tally = Tally()
        self._notes: dict[str, None] = {}
        # Not a method: the run's tables hold it, and with the run they would stay on their devices
        # until the cycle is found.
        self.note: Callable[[str], None] = self._notes.setdefault
        """Adds a remark to the report, once."""
        self.failures = Failures()
        self.replaced_blocks = ReplacedBlocks()
        self.backend = exact_backend()
        self.session = Session(
            settings.aim,
            dense_steps=self.window.dense_steps(schedule),
            sparse_steps=self.window.sparse_steps(schedule),
            profile=profile,
            note=self.note,
            untracked=untracked_allocations,
            speed=partial(known_table, backend=self.backend),
            exact_dense=settings.exact_dense,
            maps_of=maps_of,
        )
        falls = settings.aim is not None and settings.aim.falls
        self.needs_level = falls or not self.window.is_everything
        """Whether a pass has to know its noise level, for which it waits."""
        live = LiveMap(self.session, len(schedule), node_id)

        def tell(text: str, last: bool) -> None:  # holds no run, as `note` does not
            show(text)
            if last:
                live.drop()
            else:
                live.show(text)

        self.progress = Progress(schedule, tell)
        self._began: float | None = None
        self._profile_name = profile_name
        self._model, self._device = model, device
        self._step = 0
        self._evaluated = False
        self._of_step: set[int] = set()  # conditionings of a step, where nobody counts evaluations
        self._unusable: dict[torch.device, str] = {}
        self._lock = threading.Lock()

    @property
    def notes(self) -> list[str]:
        return list(self._notes)

    def start_clock(self) -> None:
        """Starts the clock at the first pass: kernels and model are there."""
        self._began = self._began or time.perf_counter()

    def begin_evaluation(self) -> None:
        """Begins an evaluation of the model. It counts as a step whatever passes ComfyUI splits it
        into: those follow from the free memory, and the result must not."""
        with self._lock:
            self._step += self._evaluated
            self._evaluated = True

    def step_of(self, conditioning: Conditioning) -> int:
        """Number of the step that a pass belongs to which begins.

        A pack that samples past ComfyUI's guiders begins no evaluation: there, a step is over when
        one of its conditionings comes again.
        """
        with self._lock:
            if not self._evaluated:
                if self._of_step.intersection(conditioning):
                    self._step += 1
                    self._of_step.clear()
                self._of_step.update(conditioning)
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

    def note_missing_layers(self, total: int | None) -> None:
        """Notes what dense_blocks asks in vain of a model of so many layers."""
        spans = self.settings.dense_layers
        if total is None and spans.needs_total:
            self.note("negative dense_blocks do nothing: this model's block count is unknown")
        if total is not None and (missing := spans.missing(total)):
            numbers = ", ".join(map(str, missing))
            self.note(f"dense_blocks names {numbers}; this model has blocks 0-{total - 1}")

    def unusable(self, device: torch.device) -> str | None:
        """Reason why attention on this device stays dense for the whole run, or None."""
        return self._unusable.get(device) or unusable_reason(device)

    def give_up(self, device: torch.device, reason: str) -> None:
        """Keeps the rest of the run dense on this device."""
        self._unusable.setdefault(device, reason)

    def result(self, fingerprint: Fingerprint | None, stopped: bool) -> RunResult:
        """Result of the run when it is over. Waits for the GPU."""
        tables = self.session.chosen
        probes = [table.probe.totals[1] for table in tables if table.probe is not None]
        if not all(bool(totals.isfinite().all()) for totals in probes):  # no dense call tells
            self.note(NOT_FINITE_LATER)
        profile = None
        if fingerprint is not None:
            profile = self.session.profile(fingerprint, {"model": self.tally.family})
        report = self.session.report()
        return RunResult(
            self.tally,
            report,
            stopped,
            tuple(self.notes),
            profile,
            any(table.from_profile for table in tables),
            self._profile_name,
            len(self.schedule),
            0.0 if self._began is None else time.perf_counter() - self._began,
            self.session.block_maps(),
        )


def unusable_reason(device: torch.device) -> str | None:
    """Reason why the kernels cannot run on this device, or None when they can."""
    if not speed_matters():
        return None
    capability = capabilities(device)
    return None if capability.usable else capability.reason

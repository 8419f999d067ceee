# SPDX-License-Identifier: Apache-2.0
"""State of one sampling run. It is made when the run starts and dropped at its end."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..sparge import VARIANTS, TokenGrid, TokenOrder, capabilities
from ..sparge.order.grid import unmeasured_order
from ..sparge.tune import PassRecord, Profile, Session
from ..sparge.tune.facts import Conditioning
from ..sparge.tune.worth import speed_matters
from .decision import SigmaWindow
from .failures import Failures
from .host import untracked_allocations
from .layer_counter import ReplacedBlocks
from .settings import Settings


@dataclass
class Tally:
    """Counts of calls; several threads add to it when ComfyUI splits a run over GPUs."""

    sparse: int = 0
    cross: int = 0
    faster_cross: int = 0
    faster_dense: int = 0
    """Dense calls by another kernel than ComfyUI's choice."""
    forwards: int = 0
    tokens: int = 0
    family: str = ""
    filter_left_out: bool = False
    finished: int = 0
    """Forward passes that came to their end."""
    may_have_been_sparse: bool = False
    """Whether one of them may have been sparse, or nothing may in the whole run."""
    grid_tokens: int = 0
    """Most tokens that a clip had in a pass; 0 where that was never known."""
    reasons: Counter[str] = field(default_factory=Counter)
    _grid: tuple[int, int, int] | None = field(default=None, repr=False)
    _reached: bool = field(default=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def dense(self) -> int:
        return self.reasons.total()

    @property
    def calls(self) -> int:
        return self.sparse + self.dense + self.cross

    @property
    def missing(self) -> str:
        """Missing self-attention, as in `RunResult`."""
        if self._grid is None or self._reached or not self.finished or self.calls == 0:
            return ""
        return "clip" if self._grid[0] > 1 else "picture"

    def add_forward(self, family: str, grid: tuple[int, int, int] | None) -> None:
        """Counts a forward pass. grid: tokens of the clip along (time, height, width)."""
        with self._lock:
            self.forwards += 1
            self.family = family
            self._grid, self._reached = grid, self._reached or grid is None
            self.grid_tokens = max(self.grid_tokens, math.prod(grid) if grid else 0)

    def end_forward(self, may_be_sparse: bool) -> None:
        with self._lock:
            self.finished += 1
            self.may_have_been_sparse |= may_be_sparse

    def reach(self) -> None:
        """Notes that a call of the clip's self-attention came."""
        self._reached = True

    def add_sparse(self, tokens: int, filter_left_out: bool) -> None:
        with self._lock:
            self.sparse += 1
            self.filter_left_out |= filter_left_out
            self.tokens = max(self.tokens, tokens)

    def add_dense(self, reason: str, tokens: int, by_faster_kernel: bool) -> None:
        with self._lock:
            self.reasons[reason] += 1
            self.faster_dense += by_faster_kernel
            self.tokens = max(self.tokens, tokens)

    def add_cross(self, by_faster_kernel: bool) -> None:
        with self._lock:
            self.cross += 1
            self.faster_cross += by_faster_kernel


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
    ) -> None:
        """Starts a run. schedule: noise level of each step, as far as it is known. model, device:
        what is sampled, and where. profile_name: as the user knows it."""
        self.owner = owner
        self.settings = settings
        self.profile_name = profile_name
        self.asked = settings.policy()
        """Policy for any device; `pv_filter.fitted` makes it one's own."""
        self.window = sigma_window(settings, model_sampling)
        self.schedule = schedule
        self.tally = Tally()
        self.notes, self.note = _notes()
        self.failures = Failures()
        self.records: list[PassRecord] = []
        self.replaced_blocks = ReplacedBlocks()
        self.heads: Session | None = None
        if settings.aim is not None:
            self.heads = Session(
                settings.aim,
                dense_steps=self.window.dense_steps(schedule),
                sparse_steps=self.window.sparse_steps(schedule),
                profile=profile,
                note=self.note,
                untracked=untracked_allocations,
            )
        falls = settings.aim is not None and settings.aim.falls
        self.needs_level = falls or not self.window.is_everything
        """Whether a pass has to know its noise level, for which it waits."""
        self._model, self._device = model, device
        self._step = 0
        self._evaluated = False
        self._of_step: set[int] = set()  # conditionings of a step, where nobody counts evaluations
        self._grids: set[TokenGrid] = set()
        self._unusable: dict[torch.device, str] = {}
        self._lock = threading.Lock()

    def begin_evaluation(self) -> None:
        """Begins an evaluation of the model. It counts as a step whatever passes ComfyUI splits it
        into: those follow from the free memory, and the result must not."""
        with self._lock:
            self._step += self._evaluated
            self._evaluated = True

    def which(self, model: object, device: torch.device) -> int:
        """Number of the model that a pass is of: 0 for what is sampled, wherever it was copied to
        (multi-GPU); else a number for another model, which a guider runs beside it on its device
        (DualModelGuider)."""
        if self._model is None or model is self._model or device != self._device:
            return 0
        apart = "" if self.heads is None else ", and its heads are measured apart"
        self.note(
            "the guider runs a second model as well: it follows the settings of this node, "
            f"whatever nodes it went through{apart}"
        )
        return id(model)  # id of objects that outlive the run

    def begin_pass(
        self, conditioning: Conditioning, rows: int, device: torch.device, may_be_sparse: bool
    ) -> PassRecord:
        """Begins a forward pass. Call it before the pass, never inside an attention call: ComfyUI
        may be recording allocations there, and these outlive the call.

        A pack that samples past ComfyUI's guiders begins no evaluation: there, a step is over when
        one of its conditionings comes again.
        """
        with self._lock:
            if not self._evaluated:
                if self._of_step.intersection(conditioning):
                    self._step += 1
                    self._of_step.clear()
                self._of_step.update(conditioning)
            self.records.append(PassRecord.begin(self._step, rows, device, may_be_sparse))
            return self.records[-1]

    def order(self, grid: TokenGrid, step: int, device: torch.device) -> TokenOrder:
        """Token order that a step of manual mode takes; copied to the device once a run."""
        with self._lock:
            self._grids.add(grid)
        return unmeasured_order(grid, step % VARIANTS).on(device)

    def end(self) -> None:
        """Gives back what outlives passes on the devices."""
        for grid in self._grids:
            for variant in range(VARIANTS):
                unmeasured_order(grid, variant).forget_copies()
        if self.heads is not None:
            self.heads.end()

    def unusable(self, device: torch.device) -> str | None:
        """Reason why attention on this device stays dense for the whole run, or None."""
        with self._lock:
            if device in self._unusable:
                return self._unusable[device]
        return unusable_reason(device)

    def give_up(self, device: torch.device, reason: str) -> None:
        """Keeps the rest of the run dense on this device."""
        with self._lock:
            self._unusable.setdefault(device, reason)


def _notes() -> tuple[list[str], Callable[[str], None]]:
    """Remarks for the report, and a function that adds one, once. It does not hold the run: the
    run's tables hold it, and would stay on their devices until the cycle is found."""
    notes: list[str] = []
    lock = threading.Lock()

    def note(text: str) -> None:
        with lock:
            if text not in notes:
                notes.append(text)

    return notes, note


def unusable_reason(device: torch.device) -> str | None:
    """Reason why the kernels cannot run on this device, or None when they can."""
    if not speed_matters():
        return None
    capability = capabilities(device)
    return None if capability.usable else capability.reason


def sigma_window(settings: Settings, model_sampling: Any) -> SigmaWindow:
    """Turns percent into sigma, with the model sampling that is in force when sampling starts.

    The edges 0 and 1 are open: model samplings disagree about the sigma they give them.
    """

    def sigma(percent: float) -> float:
        return float(model_sampling.percent_to_sigma(percent))

    return SigmaWindow(
        start=sigma(settings.start_percent) if settings.start_percent > 0 else float("inf"),
        end=sigma(settings.end_percent) if settings.end_percent < 1 else 0.0,
    )

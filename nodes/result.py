# SPDX-License-Identifier: Apache-2.0
"""Result of a run when it is over: numbers on the CPU, nothing of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sparge.tune import Densities, Fingerprint, MeasuredShape, Profile, mean_error
from .run_state import Run

#: Remark where sparse calls came before, so that nothing tells whose doing it is.
NOT_FINITE_LATER = (
    "NaN or inf came into attention in sparse steps: bypass this node and queue the same seed to "
    "see whether the model gives them by itself"
)


@dataclass(frozen=True, eq=False)
class RunResult:
    """Facts of one run, as the report and the end-of-run line tell it."""

    family: str
    tokens: int
    stopped: bool
    sparse: int
    dense: int
    cross: int
    faster_dense: int
    """Dense calls by a faster kernel than ComfyUI's choice; below likewise of cross-attention."""
    faster_cross: int
    forwards: int
    density: float
    layers: Tensor
    """(layers,) int64: number of each layer with self-attention."""
    by_step: Tensor
    """(layers, steps) float32: share of attention that was computed, 1 where it was dense, NaN in
    steps without any."""
    reasons: Mapping[str, int]
    """Reasons of dense self-attention calls, the most frequent first."""
    notes: tuple[str, ...]
    filter_left_out: bool
    """Whether some sparse call ran without the PV filter that was asked for."""
    asked: str
    """Aim of measured heads, "" in manual mode."""
    shapes: tuple[MeasuredShape, ...]
    profile: Profile | None
    """Profile that this run measured, and that can be saved."""
    from_profile: bool
    """Whether choices of some shape came from a profile."""
    profile_name: str = ""
    steps: int = 0
    """Number of steps of the schedule; 0 where that is not known."""
    stopped_early: bool = False
    """Whether an error or the user stopped it before a pass that may be sparse was over."""
    missing: str = ""
    """"clip" or "picture" where its self-attention never came, although other attention did."""
    grid_tokens: int = 0
    """Number of tokens of the clip, where they are known."""

    @classmethod
    def of(cls, run: Run, fingerprint: Fingerprint | None, stopped: bool) -> RunResult:
        """Waits for the GPU."""
        tally, tables = run.tally, run.heads.tables.frozen if run.heads else []
        densities = Densities.of(run.records)
        by_step = densities.by_step
        layers = (~by_step.isnan()).any(1).nonzero().flatten()
        profile = None
        if run.heads is not None and fingerprint is not None:
            profile = run.heads.profile(fingerprint, {"model": tally.family})
        return cls(
            tally.family,
            tally.tokens,
            stopped,
            tally.sparse,
            tally.dense,
            tally.cross,
            tally.faster_dense,
            tally.faster_cross,
            tally.forwards,
            densities.overall,
            layers,
            by_step[layers],
            dict(tally.reasons.most_common()),
            (*run.notes, *_not_finite(run)),
            tally.filter_left_out,
            str(run.heads.aim) if run.heads else "",
            tuple(MeasuredShape.of(table) for table in tables),
            profile,
            any(table.from_profile for table in tables),
            run.profile_name,
            len(run.schedule),
            stopped and not tally.sparse and not tally.may_have_been_sparse,
            tally.missing,
            tally.grid_tokens,
        )

    def of_heads(self, name: str) -> Tensor:
        """(heads of all shapes and layers,) of one table of `MeasuredShape`, without NaN."""
        joined = self._joined(name)
        return joined[~joined.isnan()]

    def mean_error(self, name: str) -> float | None:
        """Mean by head weight, over the heads of all shapes and layers whose error is known, if
        any."""
        return mean_error(self._joined(name), self._joined("head_weight"))

    def _joined(self, name: str) -> Tensor:
        values = [getattr(shape, name).flatten() for shape in self.shapes]
        return torch.cat(values) if values else torch.empty(0)


def _not_finite(run: Run) -> Iterator[str]:
    """Remarks on NaN and inf in sparse steps, which no dense call tells. Waits for the GPU."""
    probes = [x.probe for x in run.heads.tables.frozen if x.probe is not None] if run.heads else []
    if any(not bool(probe.totals[1].isfinite().all()) for probe in probes):
        yield NOT_FINITE_LATER

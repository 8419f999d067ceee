# SPDX-License-Identifier: Apache-2.0
"""Decision between sparse and dense: one pure function from facts about a call to a reason."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..sparge.tune import MASK, PassFacts, Place
from .families import TokenLayout
from .settings import Settings

CROSS_ATTENTION = "cross-attention"
FRAME_BY_FRAME = "the model attends frame by frame, which only mode manual serves"
FEWER_QUERIES = "fewer queries than keys, which only mode manual serves"

#: Relative distance within which two noise levels are the same. A step often falls exactly on the
#: edge (20 steps, start_percent 0.2), where the float32 schedule and the float64 edge differ in the
#: last bits: this is above that, below a step.
SAME_SIGMA = 1e-5


@dataclass(frozen=True)
class SigmaWindow:
    """Range of noise levels in which attention may be sparse; sigma falls while sampling."""

    start: float
    end: float

    @property
    def is_everything(self) -> bool:
        return self.start == float("inf") and self.end == 0.0

    @classmethod
    def of(cls, settings: Settings, model_sampling: Any) -> SigmaWindow:
        """Turns percent into sigma, with the model sampling that is in force when sampling starts.

        The edges 0 and 1 are open: model samplings disagree about the sigma they give them.
        """
        start, end = settings.start_percent, settings.end_percent
        return cls(
            float(model_sampling.percent_to_sigma(start)) if start > 0 else float("inf"),
            float(model_sampling.percent_to_sigma(end)) if end < 1 else 0.0,
        )

    def facts(
        self, facts: PassFacts, sigma: float, schedule: Sequence[float], settings: Settings
    ) -> PassFacts:
        """Facts of a pass at a noise level, with what follows from that."""
        return replace(
            facts,
            why_dense=self.outside_reason(sigma, settings),
            is_last_dense=self.is_last_dense(sigma, schedule),
            place=self.place(sigma, schedule),
        )

    def outside_reason(self, sigma: float, settings: Settings) -> str | None:
        if settings.start_percent > settings.end_percent:
            return (
                f"start_percent {settings.start_percent:g} is above end_percent "
                f"{settings.end_percent:g}, so no step is between them"
            )
        if self._is_before(sigma):
            return f"before start_percent {settings.start_percent:g}"
        if self._is_after(sigma):
            return f"after end_percent {settings.end_percent:g}"
        return None

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

    def place(self, sigma: float, schedule: Sequence[float]) -> Place | None:
        """Place of the step at a noise level, or of the next one in the schedule; None where no
        step of the schedule is in the window."""
        inside = [x for x in schedule if not self._is_before(x) and not self._is_after(x)]
        if not inside:
            return None
        above = sum(level > sigma * (1 + SAME_SIGMA) for level in inside)
        return Place(min(above, len(inside) - 1), len(inside))

    def dense_steps(self, schedule: Sequence[float]) -> int:
        """Number of steps that are dense, at least: those outside the window, and where none comes
        before it, the one that is measured."""
        before, after = (sum(map(is_out, schedule)) for is_out in (self._is_before, self._is_after))
        return max(1, before) + after

    def sparse_steps(self, schedule: Sequence[float]) -> int | None:
        """Number of the other steps, where the schedule is known."""
        return max(0, len(schedule) - self.dense_steps(schedule)) if schedule else None

    def _is_before(self, sigma: float) -> bool:
        return sigma > self.start * (1 + SAME_SIGMA)

    def _is_after(self, sigma: float) -> bool:
        return sigma < self.end * (1 - SAME_SIGMA)


@dataclass(frozen=True)
class CallFacts:
    """Facts that one attention call shows without reading a tensor. Lengths count tokens."""

    query_tokens: int
    key_tokens: int
    has_mask: bool = False
    masks_keys: bool = False
    """Whether its mask may be padding: a row of keys for each batch entry."""
    refuses_low_precision: bool = False
    unknown_options: tuple[str, ...] = ()

    def kind(self, layout: TokenLayout, settings: Settings) -> Kind:
        """Kind of this call. For models without a row it follows from lengths alone: text is as
        long as the model was given, and never as long as min_tokens."""
        if self.query_tokens == self.key_tokens:
            return Kind.SELF
        keys_beside = self.key_tokens - layout.grid_tokens
        if self.has_mask and layout.grid and keys_beside >= 0:
            return Kind.PART  # LTXV's guides
        if layout.frame_by_frame:
            frame = self.query_tokens == layout.frame_tokens
            return Kind.PART if frame and keys_beside in (0, layout.frame_tokens) else Kind.CROSS
        fewer = self.query_tokens < self.key_tokens != layout.context
        unknown = layout.text is None and self.key_tokens >= settings.min_tokens
        return Kind.PART if fewer and unknown else Kind.CROSS


class Kind(enum.Enum):
    """Kinds of attention calls: what attends to what."""

    SELF = enum.auto()
    PART = enum.auto()
    """Attention of some queries of a self-attention, maybe with further keys."""
    CROSS = enum.auto()


def dense_reason(
    call: CallFacts, layer: int, run_reason: str | None, layout: TokenLayout, settings: Settings
) -> str | None:
    """Reason why this call stays dense, or None for a sparse one.

    layer: number of the running layer. run_reason: holds for every call of the forward pass (the
    device cannot, or the step is outside the window). What the arithmetic cannot serve (head_dim,
    strides, gradients) the library refuses itself, with a reason.
    """
    kind = call.kind(layout, settings)
    if kind is Kind.CROSS:
        return CROSS_ATTENTION
    if call.has_mask and not (kind is Kind.SELF and call.masks_keys):
        return MASK
    if call.refuses_low_precision:
        return "the model asks for full precision here"
    if call.unknown_options:
        return f"the model uses an option unknown here ({', '.join(call.unknown_options)})"
    if call.key_tokens < settings.min_tokens:
        return f"fewer than min_tokens ({settings.min_tokens}) tokens"
    if kind is Kind.PART and settings.aim is not None:
        return FRAME_BY_FRAME if layout.frame_by_frame else FEWER_QUERIES
    if call.query_tokens < layout.frame_tokens:
        return "fewer tokens than a frame has"  # text or sound alone; text stays exact
    if run_reason is not None:
        return run_reason
    if settings.dense_layers.contains(layer, layout.blocks):
        return "listed in dense_blocks"
    return None

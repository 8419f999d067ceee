# SPDX-License-Identifier: Apache-2.0
"""Decision between sparse and dense: one pure function from facts about a call to a reason."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..tune.real_tokens import MASK
from .layout import TokenLayout
from .settings import Settings

CROSS_ATTENTION = "cross-attention"
FRAME_BY_FRAME = "the model attends frame by frame, which only mode manual serves"
FEWER_QUERIES = "fewer queries than keys, which only mode manual serves"


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
    device cannot, or the step is outside the window).
    """
    reason = exact_reason(call, layout, settings) or run_reason
    if reason is None and settings.dense_layers.contains(layer, layout.blocks):
        return "listed in dense_blocks"
    return reason


def exact_reason(call: CallFacts, layout: TokenLayout, settings: Settings) -> str | None:
    """Reason why this call is exact in every step, or None. What the arithmetic cannot serve
    (head_dim, strides, gradients) the library refuses itself, with a reason."""
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
    return None

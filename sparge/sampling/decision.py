# SPDX-License-Identifier: Apache-2.0
"""Attention call as a host gives it, and the decision on it: a pure function of facts, shared by
the calls of a pass that show the same ones."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..tune.call import Call
from ..tune.real_tokens import MASK
from .layout import TokenLayout
from .settings import Settings

CROSS_ATTENTION = "cross-attention"
FRAME_BY_FRAME = "the model attends frame by frame, which only mode manual serves"
#: Remark on sparse calls of a known model whose tokens are not those of its clip.
UNKNOWN_TOKENS = (
    "some calls have other tokens than the clip and its text (an image of another size?): those "
    "stay in the order they come, which errs more"
)
#: Remark on such calls of a model that several GPUs share.
TEXT_NOT_EXACT = "several GPUs share the model, and text was not exact: nobody says where it stands"
#: Remark on sparse calls of some of the queries.
PART_AS_IT_COMES = "the model attends frame by frame: those calls keep their tokens as they come"
FEWER_QUERIES = "fewer queries than keys, which only mode manual serves"


@dataclass(frozen=True)
class CallFacts:
    """Facts that one attention call shows without reading a tensor. Lengths count tokens."""

    query_tokens: int
    key_tokens: int
    has_mask: bool = False
    masks_keys: bool = False
    """Whether its mask may be padding, by its shape."""
    refuses_low_precision: bool = False
    unknown_options: tuple[str, ...] = ()
    reference_tokens: int = 0
    """Image tokens that a model appends after the grid (Flux edits)."""

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


class GivenCall(ABC):
    """Attention call in the conventions of a host: what a pass asks of it."""

    q: Tensor
    mask: Tensor | None

    @cached_property
    @abstractmethod
    def tensors(self) -> Call | str:
        """Views of q, k and v that go together; or the reason why there are none, for the user."""

    @cached_property
    @abstractmethod
    def facts(self) -> CallFacts: ...

    @property
    @abstractmethod
    def key_mask(self) -> Tensor | None:
        """Mask of the call where it may be padding, by its shape, else None."""

    @abstractmethod
    def of_tensors(self, call: Call) -> GivenCall:
        """Same call without its mask, of other tensors (B, H, S, D) in and out."""


class Kind(enum.Enum):
    """Kinds of attention calls: what attends to what."""

    SELF = enum.auto()
    PART = enum.auto()
    """Attention of some queries of a self-attention, maybe with further keys."""
    CROSS = enum.auto()


@dataclass(frozen=True)
class Decision:
    """Decision on calls, whatever their layer and their heads are like."""

    kind: Kind
    why_exact: str | None
    """Why they are exact in every step; None where they may be sparse."""
    tokens: int
    """Tokens of the sequence that they are of."""
    is_of_clip: bool
    """Whether they are of the clip's self-attention or, as some models have it, a part of it: never
    of text or sound alone, nor of the clip attending to text or sound."""
    ends: tuple[int, int]
    """Tokens at either end that stay exact in sparse ones."""
    remarks: tuple[str, ...]
    """On sparse ones, for the user."""

    @classmethod
    def of(
        cls, call: CallFacts, layout: TokenLayout, settings: Settings, beside: Collection[int] = ()
    ) -> Decision:
        """beside: numbers of tokens of what is sampled beside the clip (sound), alone."""
        kind, tokens = call.kind(layout, settings), call.query_tokens
        sequence = tokens
        if kind is Kind.PART:
            sequence = min(call.key_tokens, layout.grid_tokens or call.key_tokens)
        alone = tokens in beside and tokens != layout.grid_tokens
        whole = call.key_tokens >= layout.grid_tokens or kind is Kind.SELF
        return cls(
            kind,
            _why_exact(kind, call, layout, settings),
            sequence,
            tokens >= layout.frame_tokens and not alone and whole,
            *_ends_and_remarks(kind, call, layout),
        )


def _why_exact(kind: Kind, call: CallFacts, layout: TokenLayout, settings: Settings) -> str | None:
    """Reason why a call is exact in every step, or None. What the arithmetic cannot serve
    (head_dim, strides, gradients) the library refuses itself, with a reason."""
    if kind is Kind.CROSS:
        return CROSS_ATTENTION
    if call.has_mask and not (kind is Kind.SELF and call.masks_keys):
        return MASK
    if call.refuses_low_precision:
        return "the model asks for full precision here"
    if call.unknown_options:
        return f"the model uses an option unknown here ({', '.join(call.unknown_options)})"
    # A frame is a part of the clip, which is long.
    queries = call.key_tokens if layout.frame_by_frame else call.query_tokens
    if min(queries, call.key_tokens) < settings.min_tokens:
        return f"fewer than min_tokens ({settings.min_tokens}) tokens"
    if kind is Kind.PART and settings.aim is not None:
        return FRAME_BY_FRAME if layout.frame_by_frame else FEWER_QUERIES
    if call.query_tokens < layout.frame_tokens:
        return "fewer tokens than a frame has"  # text or sound alone; text stays exact
    return None


def _ends_and_remarks(
    kind: Kind, call: CallFacts, layout: TokenLayout
) -> tuple[tuple[int, int], tuple[str, ...]]:
    known = (layout.remark,) if layout.remark else ()
    if kind is not Kind.SELF:
        return (0, 0), known or (PART_AS_IT_COMES,)
    ends = layout.exact_tokens(call.query_tokens, call.reference_tokens)
    if layout.sequence(call.query_tokens) is not None:
        return ends, known
    if any(ends) and layout.ranks > 1:
        return (0, 0), (TEXT_NOT_EXACT, *(known or (UNKNOWN_TOKENS,)))
    return ends, known or (UNKNOWN_TOKENS,)

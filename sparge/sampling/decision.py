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
#: Remarks on sparse calls of other numbers of queries and keys.
FRAMES_AS_THEY_COME = "the model attends frame by frame: those calls keep their tokens as they come"
PART_AS_IT_COMES = (
    "queries and keys differ in number in some calls (a node adds or merges tokens?): those keep "
    "their tokens as they come, and text among them is not exact"
)
DIFFERENT_NUMBERS = (
    "queries and keys differ in number (a node adds or merges tokens?), which only mode manual "
    "serves"
)


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
    heads: int = 1
    """Heads of all batch entries."""

    @property
    def pairs(self) -> int:
        """Number of query-key pairs of all heads and batch entries."""
        return self.heads * self.query_tokens * self.key_tokens

    def kind(self, layout: TokenLayout, beside: Collection[int] = ()) -> Kind:
        """Kind of this call, by the lengths of what the model is given. beside: as in
        `Decision.of`."""
        if self.query_tokens == self.key_tokens:
            return Kind.SELF
        others = {layout.context, *layout.prompts, *beside} - {layout.grid_tokens}
        return Kind.CROSS if others & {self.query_tokens, self.key_tokens} else Kind.PART


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
    """Self-attention, as far as is known, of other numbers of queries and keys: of some queries, or
    with further keys or merged ones."""
    CROSS = enum.auto()
    """Attention to the prompt, or between the clip and what is sampled beside it."""


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
        kind, tokens = call.kind(layout, beside), call.query_tokens
        sequence = tokens
        if kind is Kind.PART:
            longer = max(tokens, call.key_tokens)
            sequence = min(longer, layout.grid_tokens or longer)
        alone = tokens in beside and tokens != layout.grid_tokens
        long = min(tokens, call.key_tokens) >= layout.frame_tokens
        return cls(
            kind,
            _why_exact(kind, call, layout, settings),
            sequence,
            kind is not Kind.CROSS and long and not alone,
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
    if call.key_tokens < settings.min_tokens:
        return f"fewer than min_tokens ({settings.min_tokens}) tokens"
    if kind is Kind.PART and settings.aim is not None:
        return FRAME_BY_FRAME if layout.frame_by_frame else DIFFERENT_NUMBERS
    if call.query_tokens < layout.frame_tokens:
        return "fewer tokens than a frame has"  # text or sound alone; text stays exact
    return None


def _ends_and_remarks(
    kind: Kind, call: CallFacts, layout: TokenLayout
) -> tuple[tuple[int, int], tuple[str, ...]]:
    known = (layout.remark,) if layout.remark else ()
    if kind is not Kind.SELF:
        part = FRAMES_AS_THEY_COME if layout.frame_by_frame else PART_AS_IT_COMES
        return (0, 0), known or (part,)
    ends = layout.exact_tokens(call.query_tokens, call.reference_tokens)
    if layout.sequence(call.query_tokens) is not None:
        return ends, known
    if any(ends) and layout.ranks > 1:
        return (0, 0), (TEXT_NOT_EXACT, *(known or (UNKNOWN_TOKENS,)))
    return ends, known or (UNKNOWN_TOKENS,)

# SPDX-License-Identifier: Apache-2.0
"""Tokens and layers of one forward pass: its grid, its text, and which tokens stay exact."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..checks.argument import check_kind, whole_number
from ..order.grid import TokenGrid
from ..reasons import Reason

#: Number of a layer that the numbers of dense_blocks never mean.
UNNUMBERED = -1
#: Rows for the layers of a model that cannot be counted: more than most have.
_UNCOUNTED_ROWS = 256


class TextPosition(enum.Enum):
    """Place of the tokens that are not on the video grid, in the self-attention sequence."""

    FIRST = "first"
    LAST = "last"
    NONE = "none"


class Layer(NamedTuple):
    """Layer that a call is of."""

    number: int
    row: int
    """Row of the layer, as in `TokenLayout.row`."""
    beside: bool = False
    """Whether it is the attention of text or sound in a layer, as far as is known."""


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Tokens and layers of one forward pass, as far as they are known before its calls.

    Attributes:
        family: the model's name for the user.
        text: position of the tokens off the grid; None where that is not known.
        grid: tokens along (time, height, width); None when it is not known.
        tokens: the whole self-attention sequence, as far as it is known; None without a grid.
        branches: other sequences that attend to themselves in the same layers.
        frame_by_frame: each frame of the grid attends on its own, to the whole grid and to what
            belongs to it.
        loose_frames: last frames of the grid, of which the model may leave tokens out.
        blocks: layers (transformer blocks) that have numbers, from 0; None where not known.
        refiners: layers that run before them and have no number.
        context: tokens of text that the model is given.
        prompts: lengths of further sequences beside the clip that it is given, such as pictures.
        beside: numbers of tokens of what is sampled beside the clip (sound), alone.
        remark: what sparse runs of a model without a row say; None with one.
        ranks: processes that share the tokens outside of attention, which sees them as dealt.
    """

    family: str = ""
    text: TextPosition | None = None
    grid: tuple[int, int, int] | None = None
    tokens: TokenGrid | None = None
    branches: tuple[TokenGrid, ...] = ()
    frame_by_frame: bool = False
    loose_frames: int = 0
    blocks: int | None = None
    refiners: int = 0
    context: int = 0
    prompts: frozenset[int] = frozenset()
    beside: frozenset[int] = frozenset()
    remark: Reason | None = None
    ranks: int = 1

    @classmethod
    def of(cls, layers: int, grid: TokenGrid | None = None, *, ranks: int = 1) -> TokenLayout:
        """Layout as a loop over sampling steps knows it.

        layers: number of self-attention layers, numbered from 0. grid: of the clip's tokens, with
        text before and after it.
        """
        layers, ranks = whole_number("layers", layers, 1), whole_number("ranks", ranks, 1)
        if grid is not None:
            check_kind("grid", grid, TokenGrid, "a TokenGrid, or None")
        sizes = None if grid is None else (grid.frames, grid.height, grid.width)
        return cls(blocks=layers, tokens=grid, grid=sizes, ranks=ranks)

    @cached_property
    def grid_tokens(self) -> int:
        return math.prod(self.grid) if self.grid else 0

    @cached_property
    def frame_tokens(self) -> int:
        return math.prod(self.grid[1:]) if self.grid else 0

    def sequence(self, tokens: int) -> TokenGrid | None:
        """Sequence of a self-attention over so many tokens; None where it is not known. Of other
        numbers than expected, less text is taken to be there. Where there is none, further tokens
        are taken to stand behind the grid."""
        if self.tokens is None:
            return None
        for known in (self.tokens, *self.branches):
            if known.tokens == tokens:
                return known
        text = tokens - (self.tokens.tokens - self.tokens.prefix - self.tokens.suffix)
        if self.text is TextPosition.FIRST and 0 <= text < self.tokens.prefix:
            return replace(self.tokens, prefix=text)  # without its padding
        if self.text is TextPosition.LAST and 0 <= text < self.tokens.suffix:
            return replace(self.tokens, suffix=text)
        if self.text is not TextPosition.NONE:
            return None
        further = tokens - self.tokens.tokens
        if further > 0:
            return replace(self.tokens, tail=self.tokens.tail + further)
        kept = replace(self.tokens, frames=max(1, self.tokens.frames - self.loose_frames))
        further = tokens - kept.tokens
        return replace(kept, tail=kept.tail + further) if further >= 0 else None

    def exact_tokens(self, tokens: int, references: int = 0) -> tuple[int, int]:
        """Numbers (prefix, suffix) of tokens that must stay exact in a self-attention over
        ``tokens`` tokens.

        references counts image tokens that a model appends after the grid (Flux edits).
        """
        if (known := self.sequence(tokens)) is not None:
            return known.prefix, known.suffix
        text = tokens - self.grid_tokens - references
        if self.grid is None or text <= 0:
            return (0, 0)
        if self.text is TextPosition.FIRST:
            return (text, 0)
        return (0, text) if self.text is TextPosition.LAST else (0, 0)

    @cached_property
    def rows(self) -> int:
        """Number of rows of tables that hold one for each self-attention layer, as `row` numbers
        them, where each is called once. Tables grow for further calls."""
        return self.blocks + self.refiners if self.blocks else _UNCOUNTED_ROWS

    def row(self, layer: int, earlier_calls: int) -> int:
        """Row of a self-attention call in `layer` after `earlier_calls` others there.

        Each further call has a row of its own: the control layers of Wan VACE call under the number
        of the layer that they steer, and a node that saves memory calls for some heads at a time.
        """
        return layer + earlier_calls * self.rows

    def refiner_row(self, refiner: int) -> int:
        """Row of a layer that has no number."""
        return (self.blocks or 0) + refiner


_SPAN = re.compile(r"(-?\d+)(?:\s*-\s*(-?\d+))?")


@dataclass(frozen=True)
class LayerSpans:
    """Spans of a text: "0-2, -1" means the first three layers and the last.

    Spans of layer numbers are inclusive; a negative number counts from the last layer.
    """

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> LayerSpans:
        """Reads the text of the widget dense_blocks.

        Raises ValueError, with what is accepted, for text that is not a list of layers.

        ComfyUI makes the text "None" of null in an API graph: no layer.
        """
        spans = []
        if text.strip() == "None":
            return cls()
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            match = _SPAN.fullmatch(part)
            if match is None:
                raise ValueError(
                    f"dense_blocks contains {part!r}; give block numbers and ranges separated by "
                    'commas, for example "0-2, -1" (negative numbers count from the last block).'
                )
            first = int(match[1])
            last = first if match[2] is None else int(match[2])
            if last < first and (last < 0) == (first < 0):
                raise ValueError(
                    f"dense_blocks contains {part!r}, which ends before it begins: write {last}-"
                    f"{first}."
                )
            spans.append((first, last))
        return cls(tuple(spans))

    def of_total(self, total: int | None) -> list[range]:
        """Layers that are listed, of so many. Without a total, spans counted from the end are left
        out."""
        ends = total or 0
        return [
            range(first + ends * (first < 0), last + ends * (last < 0) + 1)
            for first, last in self.spans
            if total is not None or min(first, last) >= 0
        ]

    def remark(self, total: int | None) -> Reason | None:
        """Numbers that a model of so many layers has not, for the user; None without any."""
        least, end = (0, math.inf) if total is None else (-total, total)
        missing = sorted({n for span in self.spans for n in span if not least <= n < end})
        has = "a number of blocks that is unknown" if total is None else f"blocks 0-{total - 1}"
        sentence = f"dense_blocks names {', '.join(map(str, missing))}; this model has {has}"
        return Reason(sentence, "unlisted") if missing else None

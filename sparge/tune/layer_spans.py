# SPDX-License-Identifier: Apache-2.0
"""Layers that a user wants dense, as a text."""

from __future__ import annotations

import re
from dataclasses import dataclass

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

    def missing(self, total: int) -> list[int]:
        """Numbers that stand in the text and that none of `total` layers has."""
        return sorted({number for span in self.spans for number in span} - {*range(-total, total)})

    @property
    def needs_total(self) -> bool:
        return any(first < 0 or last < 0 for first, last in self.spans)

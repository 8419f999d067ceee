# SPDX-License-Identifier: Apache-2.0
"""Facts that a host gives of a forward pass before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..order.grid import TokenGrid

#: Number of the conditioning of each entry of the batch, in its order, such as 0 for the positive
#: prompt and 1 for the negative one.
Conditioning = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Place of a sampling step among those that may be sparse."""

    index: int
    """From 0."""
    steps: int
    """Number of steps that may be sparse."""


@dataclass(frozen=True)
class PassFacts:
    """Facts of a forward pass that are known when it begins."""

    conditioning: Conditioning
    step: int
    why_dense: str | None = None
    """Why the whole pass has to stay dense; None where it may be sparse."""
    is_last_dense: bool = False
    """It belongs to the last dense step before the sparse ones."""
    place: Place | None = None
    """Among the steps that may be sparse; None where that is not known."""
    which: int = 0
    """Number of the model, where a run evaluates several: 0 is the one that is sampled."""

    def steps_since(self, first: PassFacts) -> int:
        """Number of steps from another pass to this one, by noise level where that is known: a step
        may evaluate the model more than once."""
        if first.place is None or self.place is None:
            return self.step - first.step
        return self.place.index - first.place.index


class Layout(Protocol):
    """Tokens and layers of a model, as far as a host knows them before a pass."""

    @property
    def rows(self) -> int:
        """Number of rows of the tables, one for each self-attention layer."""
        ...

    @property
    def heads(self) -> int | None:
        """Attention heads of a layer in this process; None where they are not known before a
        call."""
        ...

    @property
    def blocks(self) -> int | None:
        """Number of transformer blocks; None where it is not known."""
        ...

    @property
    def layers(self) -> int | None:
        """About how many self-attention layers there are, where `blocks` is not known."""
        ...

    @property
    def expected(self) -> Sequence[TokenGrid]:
        """Sequences that attend to themselves as a whole."""
        ...

    @property
    def ranks(self) -> int:
        """Number of processes that share the tokens outside of attention; 1 for one alone."""
        ...

    def sequence(self, tokens: int) -> TokenGrid | None:
        """Grid of a sequence of so many tokens; None where they have none."""
        ...

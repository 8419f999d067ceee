# SPDX-License-Identifier: Apache-2.0
"""Tokens and layers of one forward pass, as far as a host knows them before its calls."""

from __future__ import annotations

from dataclasses import dataclass

from ..tune.sequences import Sequences

#: Number of a layer that the numbers of dense_blocks never mean.
UNNUMBERED = -1
#: Rows for the layers of a model that cannot be counted: more than most have.
_UNCOUNTED_ROWS = 256


@dataclass(frozen=True)
class Layer:
    """Layer that a call is of."""

    number: int
    row: int
    """Row of the layer, as in `TokenLayout.row`."""
    beside: bool = False
    """Whether it is the attention of text or sound in a layer, as far as is known."""


@dataclass(frozen=True, kw_only=True)
class TokenLayout(Sequences):
    """Facts about the tokens and layers of one forward pass. It is a `sparge.tune.Layout`.

    Attributes:
        family: the model's name for the user.
        blocks: layers (transformer blocks) that have numbers, from 0; None where not known.
        refiners: layers that run before them and have no number.
        heads: attention heads of this process; None when they are not known before a call.
        context: tokens of text that the model is given.
        prompts: lengths of further sequences beside the clip that it is given, such as pictures.
        remark: what sparse runs of a model without a row say; "" with one.
        layers: about how many self-attentions a model has whose `blocks` are not known.
        ranks: processes that share the tokens outside of attention, which sees them as dealt.
    """

    family: str
    blocks: int | None = None
    refiners: int = 0
    heads: int | None = None
    context: int = 0
    prompts: frozenset[int] = frozenset()
    remark: str = ""
    layers: int | None = None
    ranks: int = 1

    @property
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

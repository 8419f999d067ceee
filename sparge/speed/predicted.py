# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of sparse calls on RTX cards, which nobody has measured, as a model foretells them.

    seconds = blocks clocks / (multiprocessors clock rate) + BYTES rows head_dim / bandwidth

with the blocks of 128 queries x 64 keys that are computed, and the clocks that a multiprocessor
takes for one by the machine code of attend (docs/experiments.md, Issue model).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..blocks import KEY_BLOCK, QUERY_BLOCK
from ..kernels.device import capabilities, cuda_index
from ..kernels.driver import Attribute, DriverError, attribute
from .table import Size

#: Clocks of a block by target and head_dim, with INT8 values: `python -m benchmarks.issue_model`
#: prints them, and tests/kernels/test_hot_loop.py compares.
_OF_RTX_30_AND_40 = {64: 1238, 128: 2228}
CLOCKS: Mapping[str, Mapping[int, float]] = {
    "sm_86": _OF_RTX_30_AND_40,
    "sm_89": _OF_RTX_30_AND_40,
    "sm_120a": {64: 1255, 128: 2245},
}
#: Most times as long as foretold that sparse calls took on an H100, by head_dim; short ones, which
#: those of 64 were, are furthest off.
BEYOND: Mapping[int, float] = {64: 1.7, 128: 1.3}
#: Bytes that means and quantize move for each number of q, at this share of the bandwidth.
BYTES, REACHED = 12, 0.88


@dataclass(frozen=True)
class Card:
    """Rates of one GPU."""

    multiprocessors: int
    gigahertz: float
    gigabytes: float
    """Of memory bandwidth, a second."""

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """Asks the driver. Raises DriverError."""
        index = cuda_index(device)
        of_memory = attribute(index, Attribute.MEMORY_KILOHERTZ) * 1e3
        bits = attribute(index, Attribute.MEMORY_BUS_BITS)
        return cls(
            attribute(index, Attribute.MULTIPROCESSORS),
            attribute(index, Attribute.KILOHERTZ) / 1e6,
            2 * of_memory * bits / 8 / 1e9,
        )

    def attending(self, size: Size, share: float, clocks: float) -> float:
        """Seconds in which this share of the pairs is computed, at these clocks a block."""
        blocks = size.pairs * share / (QUERY_BLOCK * KEY_BLOCK)
        return blocks * clocks / (self.multiprocessors * self.gigahertz * 1e9)

    def preparing(self, size: Size) -> float:
        """Seconds of means and quantize."""
        return BYTES * size.rows * size.head_dim / (REACHED * self.gigabytes * 1e9)


def predicted_range(
    card: Card, arch: str, size: Size, density: float, pooled: float
) -> tuple[float, float] | None:
    """Seconds of a sparse call at least and, by what the model was off before, at most; None where
    no model is. pooled: share of the heads that have pooled keys."""
    if arch not in CLOCKS:
        return None
    clocks = CLOCKS[arch][size.head_dim]
    share = density + pooled / KEY_BLOCK
    seconds = card.attending(size, share, clocks) + card.preparing(size)
    return seconds, seconds * BEYOND[size.head_dim]


def predicted_here(
    device: torch.device, size: Size, density: float, pooled: float
) -> tuple[float, float] | None:
    """`predicted_range` of a device of this machine; None too where its driver tells no rates."""
    arch = capabilities(device).arch
    try:
        card = Card.of(device)
    except DriverError:
        return None
    told = min(card.multiprocessors, card.gigahertz, card.gigabytes) > 0
    return predicted_range(card, arch, size, density, pooled) if told else None

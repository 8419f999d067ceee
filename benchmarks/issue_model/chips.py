# SPDX-License-Identifier: Apache-2.0
"""Rates of GPUs that the model knows, and which of them runs which target.

Rates of products are published ones: docs/experiments.md, Issue model. GeForce cards run products
with float32 sums at half the rate of the chip; RTX PRO, A6000 and L40S do not, and are not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from .sass import Instruction

SCHEDULERS = 4  # of an SM; each issues one instruction a clock


@dataclass(frozen=True)
class Chip:
    """One GPU's streaming multiprocessor (SM)."""

    name: str
    cards: str
    macs: Mapping[str, int]
    """Multiply-adds a clock and SM, by the instruction's name and the type of its sums."""
    shared_kib: int
    """Shared memory of an SM that thread blocks can have."""
    threads: int
    """Threads that an SM can hold."""

    def product_clocks(self, instruction: Instruction) -> float:
        """Clocks for which a product fills its scheduler's tensor core.

        Raises ValueError for a product whose rate is not known.
        """
        shape, sums, *_ = instruction.modifiers
        kind = f"{instruction.name}.{sums}" if sums in ("F32", "F16") else instruction.name
        if kind not in self.macs or "SF" in instruction.modifiers:
            raise ValueError(f"the rate of {instruction.opcode} on {self.name} is not known")
        return _multiply_adds(shape) * SCHEDULERS / self.macs[kind]


def _multiply_adds(shape: str) -> int:
    """Multiply-adds of a shape such as 16832, which is 16 x 8 x 32."""
    return prod((int(shape[:2]), int(shape[2]), int(shape[3:])))


_AMPERE = {"IMMA": 1024, "HMMA.F32": 256, "HMMA.F16": 512}
_ADA = {**_AMPERE, "QMMA.F32": 512, "QMMA.F16": 1024}
GA102 = Chip("GA102", "RTX 30", _AMPERE, 100, 1536)
AD102 = Chip("AD102", "RTX 40", _ADA, 100, 1536)
GB202 = Chip("GB202", "RTX 50", _ADA, 100, 1536)
#: mma.sync has 5/8 of the rate that wgmma has.
GH100 = Chip("GH100", "H100", {"IMMA": 2560, "HMMA.F32": 1280, "HMMA.F16": 1280}, 228, 2048)

BY_TARGET = {
    "sm_86": GA102,
    "sm_89": AD102,
    "sm_120a": GB202,
    "sm_90": GH100,
    "sm_90_as_86": GH100,
    "sm_90_as_89": GH100,
    "sm_90_as_120": GH100,
}

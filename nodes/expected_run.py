# SPDX-License-Identifier: Apache-2.0
"""Expected time of a run with Sparge Attention, from one call of the model and the times of its
attention on this GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..sparge.sampling.verdict import FASTER
from ..sparge.speed import MeasuringCost, ShapeTimes, Size
from .settings import START_OF_NEW_NODES

#: Densities that are timed, and the one of the first line.
DENSITIES = (0.5, 0.3, 0.2, 0.1)
SHOWN = 0.2


@dataclass(frozen=True)
class ExpectedRun:
    """Run without guidance whose self-attention calls are all alike."""

    size: Size
    calls: int
    """Number of self-attention calls of one step."""
    step_seconds: float
    """Seconds of a step without Sparge Attention."""
    times: ShapeTimes
    steps: int
    measuring: MeasuringCost | None = None
    """Cost of measuring heads; None where it is not known, and then not counted."""

    @property
    def without(self) -> float:
        """Seconds of the run without Sparge Attention."""
        return self.steps * self.step_seconds

    def seconds(self, density: float) -> float:
        """Seconds at a mean density in the sparse steps; calls that sparse would not speed up stay
        dense, and all of them where measuring heads does not pay."""
        rest = max(0.0, self.step_seconds - self.calls * self.times.exact)
        sparse = self._sparse_steps if self._measuring_pays else 0
        least = min(self.times.sparse[density], self.times.dense)
        attention = (self.steps - sparse) * self.times.dense + sparse * least
        measuring = self.measuring.seconds(1) if self.measuring and sparse else 0.0
        return self.steps * rest + self.calls * (attention + measuring)

    @property
    def _sparse_steps(self) -> int:
        # The first step is before any start, and so is one that begins before it.
        return self.steps - math.ceil(round(self.steps * START_OF_NEW_NODES, 6))

    @property
    def _measuring_pays(self) -> bool:
        if self.measuring is None:
            return True
        saved = self._sparse_steps * (self.times.dense - min(self.times.sparse.values()))
        return self.measuring.pays(
            heads=self.calls * self.size.heads, measurements=self.calls, saved=saved
        )

    def verdict(self) -> str:
        """Two lines for the node."""
        seconds = self.seconds(SHOWN)
        ratio, before = self.without / seconds, f"{self.without:.3g} s"
        if ratio < FASTER:
            return f"Nothing to gain: {before} as it is\n{self.steps} steps, {self._tokens}"
        first = f"{ratio:.1f}x faster: {seconds:.3g} s, not {before}"
        return f"{first}\n{self.steps} steps, {100 * SHOWN:.0f} % computed, {self._tokens}"

    @property
    def _tokens(self) -> str:
        return f"{self.size.tokens:,} tokens"

    def details(self, gpu: str) -> str:
        """The verdict and all that was measured."""
        size, share = self.size, self.calls * self.times.exact / self.step_seconds
        lines = [
            self.verdict(),
            f"Measured on {gpu} with random numbers; {self.steps} steps without guidance, the "
            f"first {100 * START_OF_NEW_NODES:.0f} % of them dense. With guidance both times "
            "double, and the ratio stays.",
            f"Attention is {100 * min(1.0, share):.0f} % of a step of {self.step_seconds:.3g} s: "
            f"{self.calls} calls of {size.tokens:,} tokens and {size.heads} heads of "
            f"{size.head_dim}.",
            *(f"{name}: {1000 * x:.3g} ms a call" for name, x in self.rows()),
            *(
                f"Whole run at {100 * density:.0f} %: {self.seconds(density):.3g} s, "
                f"{self.without / self.seconds(density):.2f} times as fast"
                for density in self.times.sparse
            ),
        ]
        return "\n".join(lines)

    def rows(self) -> list[tuple[str, float]]:
        """Name and seconds of each way to compute a call."""
        sparse = [(f"{100 * density:.0f} %", x) for density, x in self.times.sparse.items()]
        return [("without", self.times.exact), ("8 bits", self.times.eight_bit), *sparse]

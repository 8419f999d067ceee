# SPDX-License-Identifier: Apache-2.0
"""Mean density over sampling steps: the first sparse steps get more of it, the last ones less.

Later steps build on what an early step gets wrong (docs/experiments.md, Density over the sampling
steps).
"""

from __future__ import annotations


def fall_of(mean: float) -> float:
    """Share of a mean density that the first sparse step gets more and the last one less.

    Linear between 0.6 at 10 %, 0.3 at 30 % and 0 at 50 %, which were the best or nearly so. The
    denser a call, the less another block of it is worth.
    """
    return max(0.0, 0.75 * (1 - 2 * mean))


def step_means(mean: float, steps: int, least: float = 0.0) -> list[float]:
    """Densities of the sparse steps, whose mean is `mean`; a single one where all are equal.

    least: share that is kept whatever is chosen; only what is above it can fall.
    """
    fall = fall_of(mean) * (mean - least)
    if steps < 2 or fall <= 0:
        return [mean]
    return [mean + fall * (1 - 2 * step / (steps - 1)) for step in range(steps)]

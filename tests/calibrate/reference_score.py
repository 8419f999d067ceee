# SPDX-License-Identifier: Apache-2.0
"""The op `score` in torch, for CPUs and as the truth of its kernel."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from sparge.calibrate.scoring import distances, products
from sparge.reference.partial import Partial


def score_by_reference(
    exact_out: Tensor,
    exact_max: Tensor,
    exact_sum: Tensor,
    pooled_out: Tensor,
    pooled_max: Tensor,
    pooled_sum: Tensor,
    unit: Tensor,
    ends: int,
    found: Tensor,
    dense: Tensor | None = None,
) -> None:
    """Shapes as in `ScoreParams` of csrc/params.cuh."""
    of_pieces = (exact_out, exact_max, exact_sum)
    exact = Partial(*(x.movedim((2, 3), (0, 1)) for x in of_pieces))
    sums, weights = (x.movedim((2, 3), (0, 1)) for x in (pooled_out, pooled_sum))
    pooled = Partial(sums, pooled_max.expand_as(weights), weights)
    last = [piece for piece in range(exact_sum.shape[3]) if ends >> piece & 1]
    counts = [piece - before for before, piece in pairwise([-1, *last])]
    of_rows = unit.view(*unit.shape[:2], 1)
    found.copy_(distances(products(exact, pooled, of_rows, dense), counts).packed())

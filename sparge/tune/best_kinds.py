# SPDX-License-Identifier: Apache-2.0
"""Best substitute for dropped blocks among those of equal cost.

All backgrounds cost nothing, like plain dropping, and all pool weights (`gain`) cost the same. So
the later choice of head settings is between costs alone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .candidates import Kind

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class Group(enum.IntEnum):
    """Indices along the last axis of what `best_kinds` returns."""

    FREE = 0
    """Plain dropping or a background."""
    POOLED = 1
    """Pooled keys. Missing where there is no pool weight above 0."""


def best_kinds(errors: Iterable[Array], kinds: Sequence[Kind]) -> tuple[Array, Indices]:
    """Returns the least errors and the indices of the kinds that make them, each (*shape, groups).

    errors: an array of `shape` for each kind, one after another, so that they stay in the cache.
    The first group holds the kinds without pooled keys, the second, where there is one, those with
    them. The earlier of equal kinds is taken, so plain dropping wins a tie. Where no error is
    finite the first kind is taken, with an infinite error.
    """
    found: dict[bool, tuple[Array, Indices]] = {}
    for place, (of_kind, kind) in enumerate(zip(errors, kinds, strict=True)):
        pools = kind.gain > 0
        if pools not in found:
            found[pools] = np.full(of_kind.shape, np.inf), np.full(of_kind.shape, place)
        least, best = found[pools]
        better = of_kind < least  # never true of NaN
        np.copyto(least, of_kind, where=better)
        np.copyto(best, place, where=better)
    groups = [found[pools] for pools in (False, True) if pools in found]
    least, best = (np.stack(of_groups, -1) for of_groups in zip(*groups, strict=True))
    return least, best

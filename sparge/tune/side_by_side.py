# SPDX-License-Identifier: Apache-2.0
"""Work on the layers of a model in threads.

Layers know nothing of each other, and NumPy leaves the interpreter to others while it computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Threads beyond which little is gained (docs/experiments.md, Threads over layers).
MOST_THREADS = 4


def side_by_side(
    work: Callable[[slice], tuple[NDArray[Any], ...]], layers: int
) -> tuple[NDArray[Any], ...]:
    """Results of `work` on slices of the layers, joined along the first axis of each array."""
    threads = max(1, min(MOST_THREADS, os.cpu_count() or 1, layers))
    edges = np.linspace(0, layers, threads + 1).round().astype(int).tolist()
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(work, map(slice, edges[:-1], edges[1:])))
    return tuple(np.concatenate(arrays) for arrays in zip(*found, strict=True))

# SPDX-License-Identifier: Apache-2.0
"""How far an output lies from the mean value, put right.

Whatever stands for dropped keys draws a head's output towards the mean value of all keys, and plain
dropping draws outputs apart. Both go through all tokens, layers and steps alike, and a model
follows such errors: its clips suffer from them, whatever the mean error of heads. So each head's
distance from the mean value is multiplied by the factor that gives it the norm it has without
dropping, which leaves

    |c (y - m) - (o - m)|^2,    c = |o - m| / |y - m|

of an output y instead of o, around the mean value m.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def best_contrasts(
    error: Array, towards: Array, far: Array, limits: tuple[float, float]
) -> tuple[Array, Array]:
    """The contrast of each candidate, and the squared error with it; never less than 0.

    Sums over rows: error |y - o|^2 and towards <y - o, m - o>, of one shape, far |m - o|^2, which
    broadcasts. Outputs that all are the mean value have contrast 1. What is not finite stays so.
    """
    spread = error - 2 * towards + far
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        contrast = np.sqrt(far / spread)
        contrast = np.where((far > 0) & (spread > 0), contrast, 1.0).clip(*limits)
        rest = 1 - contrast
        found = contrast**2 * error + 2 * contrast * rest * towards + rest**2 * far
        return contrast, np.where(found < 0, 0.0, found)  # NaN stays

# SPDX-License-Identifier: Apache-2.0
"""Output scale (`output_scale`): the factor of a head's distance from the mean value.

Whatever stands for dropped keys draws a head's output towards the mean value of all keys, and plain
dropping draws outputs apart. A model follows such errors, which go through all tokens, layers and
steps alike. So each head's distance from the mean value is multiplied by the factor that gives it
the norm it has without dropping. For an output y instead of o and the mean value m that leaves

    |c (y - m) - (o - m)|^2,    c = |o - m| / |y - m|

The mean value is at hand where outputs are stored. Other corrections do not gain more
(docs/experiments.md, Output scale).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Expected error of an output scale in the calls that it serves, a share of its logarithm. It makes
#: heads do without candidates that lean on a large scale where others do nearly as well
#: (docs/experiments.md, How far an output scale may be off).
UNSURE = 0.4


def best_output_scales(
    error: Array, towards: Array, far: Array, limits: tuple[float, float]
) -> tuple[Array, Array]:
    """Output scale of each candidate, and the squared error expected with it, never less than 0.

    Sums over rows: error |y - o|^2 and towards <y - o, m - o>, of one shape; far |m - o|^2, which
    broadcasts. Outputs that all are the mean value have output scale 1. What is not finite stays
    so.
    """
    spread = error - 2 * towards + far
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        output_scale = np.sqrt(far / spread)
        output_scale = np.where((far > 0) & (spread > 0), output_scale, 1.0).clip(*limits)
        rest = 1 - output_scale
        found = output_scale**2 * error + 2 * output_scale * rest * towards + rest**2 * far
        found = np.where(found < 0, 0.0, found)  # NaN stays NaN
        return output_scale, found + (UNSURE * np.log(output_scale)) ** 2 * far

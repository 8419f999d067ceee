# SPDX-License-Identifier: Apache-2.0
"""How far an output lies from the mean value, put right.

Whatever stands for dropped keys draws a head's output towards the mean value of all keys, and plain
dropping draws outputs apart. Both go through all tokens, layers and steps alike, and a model
follows such errors: its clips suffer from them, whatever the mean error of heads. So each head's
distance from the mean value is multiplied by the factor that gives it the norm it has without
dropping, which leaves

    |c (y - m) - (o - m)|^2,    c = |o - m| / |y - m|

of an output y instead of o, around the mean value m. Clips of five DiTs (as in `alternating.py`;
10 % density, residual in all steps, clips 0-2, H200; outputs of 82c859e changed in each call; dB):

    nothing put right                              28.9 27.9 25.8 28.6 24.7
    the norm of the output                         28.9 28.1 26.9 28.7 25.8
    its mean over tokens                           28.5 27.8 25.7 28.3 24.5
    that and the norm around it                    30.2 30.3 31.2 30.6 34.0
    the norm around its own mean                   30.4 30.2 31.2 30.6 33.9
    the norm around the mean value                 30.4 30.2 31.0 30.6 32.9
    the same, of 8 query blocks, three times a run 30.1 29.9 30.6 30.6 32.6
    the least error around the mean value          30.5 29.4 30.8 30.5 30.5
    o's part along y, around the mean value        30.0 30.0 30.6 30.4 33.8

The mean value is at hand where outputs are stored. Limits of 1.3 instead of 2 cost 0 to .6 dB at
10 %, of 3 bring nothing; nor does a factor between the norm's and the last one's, or one that
follows the drift of its head's error (-.4 to .8 dB). Contrasts of another clip are better than none
in five of six cases (seed 2, seed 3 and the shipped model at 10 and 20 %: by up to 3.9 dB; seed 3
at 20 %: .7 dB worse).

What is left to gain, and how not (clips 0-3, 30 % density, in turn as in `alternating.py`, H200):

    no contrast                                    35.4 33.7 31.8 35.8 34.5
    as it is, of 8 query blocks three times a run  38.5 36.2 36.7 35.1 40.1
    of 64 query blocks                             39.1 36.7 37.2 36.1 40.1
    exact in every call                            38.9 36.2 37.3 36.1 40.4
    logarithms drawn halfway to the layer's median 38.5 35.7 36.4 34.4 38.8
    halfway to the layer's median of the error's part that points to the mean
                                                   37.1 35.2 35.9 35.4 35.8
    logarithms l drawn towards 0 by l^2 / (l^2 + .1 squared relative error)
                                                   37.5 35.1 35.3 36.4 39.3
    with half of the sums measured before          38.6 36.2 36.2 34.3 40.0

So a head's own few rows say more of its contrast than those of others do. Seed 3 loses .6 dB by it
here and 1.1 dB at 50 %; with 64 query blocks it gains .4 and loses .2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: How far off a contrast is expected to be in the calls that it serves, a share of its logarithm.
#: So heads do without kinds that lean on a large one where others do nearly as well. Without it
#: heads that are not measured again err more by the contrast than without one: calls of the shipped
#: DiT 2 to 14 steps later at 10 %, emulated, mean and worst head, .147 .74 instead of .120 .32;
#: with it .127 .39, with .2 .135 .48. And on clips of four DiTs heads err up to 1.11 times as much
#: as by plain drop, with it 1.08. Clips 0-3 of five (as above, 10 %) with 0, .2, .4 and .6: 30.2
#: 30.1 30.1 30.1, 29.9 30.1 30.0 29.6, 29.8 30.2 29.9 29.5, 30.4 30.3 30.3 30.2, 33.2 33.4 33.3
#: 33.2 dB.
UNSURE = 0.4


def best_contrasts(
    error: Array, towards: Array, far: Array, limits: tuple[float, float]
) -> tuple[Array, Array]:
    """The contrast of each candidate, and the squared error expected with it; never less than 0.

    Sums over rows: error |y - o|^2 and towards <y - o, m - o>, of one shape, far |m - o|^2, which
    broadcasts. Outputs that all are the mean value have contrast 1. What is not finite stays so.
    """
    spread = error - 2 * towards + far
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        contrast = np.sqrt(far / spread)
        contrast = np.where((far > 0) & (spread > 0), contrast, 1.0).clip(*limits)
        rest = 1 - contrast
        found = contrast**2 * error + 2 * contrast * rest * towards + rest**2 * far
        found = np.where(found < 0, 0.0, found)  # NaN stays
        return contrast, found + (UNSURE * np.log(contrast)) ** 2 * far

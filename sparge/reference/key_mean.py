# SPDX-License-Identifier: Apache-2.0
"""Sample of keys that the mean key is taken of.

Attention does not change by what is subtracted from all keys. The nearer that is to their mean, the
less their rounding costs; and the mean of a sample of a long sequence is as near.

The sample is a run of 64 tokens in every seven: a multiple of seven runs is seldom a whole number
of rows of a frame, so that runs come to all of its columns. Calls without a token order take the
mean of all keys, as upstream does.
"""

from __future__ import annotations

STRIDE = 7
#: Number of keys from which on a sample is taken: it then has more than a thousand.
LEAST_KEYS = 8192


def mean_stride(keys: int, ordered: bool) -> int:
    """Number of runs of 64 keys of which one counts, from the first on."""
    return STRIDE if ordered and keys >= LEAST_KEYS else 1

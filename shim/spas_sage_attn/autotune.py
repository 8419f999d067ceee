# SPDX-License-Identifier: Apache-2.0
"""Upstream's tuned attention."""

from sparge.compat.autotune import *  # noqa: F403
from sparge.compat.autotune import __all__  # noqa: F401

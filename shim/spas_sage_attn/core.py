# SPDX-License-Identifier: Apache-2.0
"""Upstream's attention functions."""

from sparge.compat.core import *  # noqa: F403
from sparge.compat.core import __all__  # noqa: F401

# SPDX-License-Identifier: Apache-2.0
"""Upstream's block maps."""

from sparge.compat.utils import *  # noqa: F403
from sparge.compat.utils import __all__  # noqa: F401

# SPDX-License-Identifier: Apache-2.0
"""Upstream's helpers; the modules in this folder refuse the names of those that are not served."""

from sparge.compat.utils import *  # noqa: F403
from sparge.compat.utils import __all__  # noqa: F401

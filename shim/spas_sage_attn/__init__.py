# SPDX-License-Identifier: Apache-2.0
"""Upstream's module name for the functions of sparge.compat."""

try:
    from sparge.compat import *  # noqa: F403
    from sparge.compat import __all__  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("sparge", "sparge.compat"):
        raise
    raise ImportError(
        "This spas_sage_attn is a shim over the sparge library, which is not installed: run "
        "`pip install .` in the root of the SpargeAttention node pack."
    ) from error

# As attributes too, since upstream has them after `import spas_sage_attn` alone.
from . import core, utils  # noqa: F401

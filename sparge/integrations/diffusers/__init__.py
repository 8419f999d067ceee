# SPDX-License-Identifier: Apache-2.0
"""Sparge Attention in pipelines of diffusers.

handle = sparge.integrations.diffusers.enable(pipe, mode="auto quality", quality="balanced")
video = pipe(prompt).frames
print(handle.line)
"""

import sys
from contextlib import suppress

from ...errors import Unsupported
from .backend import register_backend
from .handle import Handle, enable

if "diffusers" in sys.modules:  # which this package does not import itself
    with suppress(Unsupported):
        register_backend()

__all__ = ["Handle", "enable", "register_backend"]

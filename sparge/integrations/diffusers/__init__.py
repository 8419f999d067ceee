# SPDX-License-Identifier: Apache-2.0
"""Sparge Attention in pipelines of diffusers.

handle = sparge.integrations.diffusers.enable(pipe, mode="auto quality", quality="balanced")
video = pipe(prompt).frames
print(handle.line)
"""

from .backend import register_backend
from .handle import Handle, enable

__all__ = ["Handle", "enable", "register_backend"]

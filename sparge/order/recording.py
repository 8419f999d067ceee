# SPDX-License-Identifier: Apache-2.0
"""Whether a call is being recorded: what recorded calls read must stay in place."""

from __future__ import annotations

import torch


def being_recorded(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the current stream. False for other devices, and while
    `torch.compile` traces, which fetches what is kept anew in every call."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return torch.cuda.is_current_stream_capturing()

# SPDX-License-Identifier: Apache-2.0
"""Context for sums in torch's own operations, in the types in which they are written down."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def as_written(device: torch.device) -> AbstractContextManager[object]:
    """Context around float32 arithmetic on `device`, in which a caller's autocast has no say."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)

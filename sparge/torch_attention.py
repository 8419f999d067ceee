# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own attention, wherever something of ours stands in its place.

This module is imported with the library, so a name in `torch.nn.functional` that is replaced later
changes nothing here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

#: Function that `torch.nn.functional` had when the library was imported.
TORCH_ATTENTION = scaled_dot_product_attention


def exact_attention(*arguments: Any, **named: Any) -> Tensor:
    """Result of `scaled_dot_product_attention`, also inside `sparge.sdpa`, which would catch the
    call of a model."""
    with torch._C.DisableTorchFunction():
        return TORCH_ATTENTION(*arguments, **named)

# SPDX-License-Identifier: Apache-2.0
"""Small models and layers, of which the node sees names and sizes alone."""

from __future__ import annotations

from typing import Any

import torch

HEADS, BLOCKS = 2, 2
LATENT = (4, 16, 16)
#: Number of tokens of that latent in patches of Wan.
TOKENS = 4 * 8 * 8
#: Relative error of 8-bit arithmetic where everything is kept.
EIGHT_BIT = 0.02


def network(name: str = "WanModel", *parents: type, **attributes: Any) -> Any:
    """Model that is one of a family by its name; nothing of it runs."""
    usual = {"patch_size": (1, 2, 2), "num_heads": HEADS, "blocks": range(BLOCKS)}
    return type(name, (*parents, torch.nn.LayerNorm), usual | attributes)(8)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())

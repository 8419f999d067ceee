# SPDX-License-Identifier: Apache-2.0
"""Time that a call takes at least, by the rates of a GPU: docs/experiments.md, What the GPU allows,
has the formula and how the rates were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from sparge.blocks import KEY_BLOCK, QUERY_BLOCK

from .shapes import Shape

#: Rates a second by kind: operations (two a multiply-add), elements, or bytes.
Rates = Mapping[str, float]


def read_rates(path: Path) -> Rates:
    """Largest rate of each kind; a rate that is a text says why it was not measured."""
    kinds = json.loads(path.read_text(encoding="utf-8"))["rates"]
    return {
        kind: max(rate for rate in named.values() if not isinstance(rate, str))
        for kind, named in kinds.items()
    }


def limit_ms(shape: Shape, density: float, rates: Rates, pooled_heads: float = 0.0) -> float:
    """Milliseconds at least. `density` and `pooled_heads` are shares, 0 to 1."""
    pairs = shape.heads * shape.tokens**2 * (density + pooled_heads / KEY_BLOCK)
    product = 2 * shape.head_dim * pairs
    elements = shape.heads * shape.tokens * shape.head_dim
    overlapping = (
        product / rates["int8_ops"] + product / rates["e4m3_ops"],
        pairs / rates["exp2"],
        pairs / rates["e4m3_conversions"],
        product / QUERY_BLOCK / rates["tile_bytes"],
        4 * elements / rates["copy_bytes"],
    )
    preparation = 12 * elements / rates["copy_bytes"]
    if density < 1:
        block_products = 2 * elements * shape.tokens / QUERY_BLOCK / KEY_BLOCK
        preparation += block_products / rates["bf16_flops"]
    return 1000 * (max(overlapping) + preparation)

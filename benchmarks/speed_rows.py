# SPDX-License-Identifier: Apache-2.0
"""One measured call as a row of the results, and how far it is from float32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.metrics import rel_l1, rel_l2
from sparge.blocks import KEY_BLOCK, QUERY_BLOCK, block_count

from .shapes import Shape

SAMPLED_BLOCKS = 3

#: Names of our rows: in raster order; everything on: cube order, half of the heads pooled;
#: densities of heads, too, which take both token orders.
OURS, OURS_BUDGETS, OURS_SPREAD = "ours", "ours, budgets", "ours, budgets spread tenfold"


def errors(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor | None,
    heads: Iterable[int] = (),
    blocks: int = SAMPLED_BLOCKS,
) -> tuple[float, float]:
    """Relative L1 and L2 on a few query blocks of `heads`, else of the first and the last one.

    kept: (1, H, query blocks, key blocks) bool, beside attention over which the result is judged;
    None means over all keys.

    Raises RuntimeError where the result is not finite: a time of it would mean nothing.
    """
    tokens = q.shape[2]
    all_blocks = block_count(tokens, QUERY_BLOCK)
    got, truth = [], []
    for head in heads or {0, q.shape[1] - 1}:
        for block in {all_blocks * i // blocks for i in range(blocks)}:
            rows = slice(block * QUERY_BLOCK, min((block + 1) * QUERY_BLOCK, tokens))
            keys = slice(None)
            if kept is not None:
                keys = kept[0, head, block].repeat_interleave(KEY_BLOCK)[:tokens]
            queries, seen, values = q[0, head, rows], k[0, head, keys], v[0, head, keys]
            logits = queries.float() @ seen.float().T * q.shape[-1] ** -0.5
            truth.append((logits.softmax(-1) @ values.float()).flatten())
            got.append(out[0, head, rows].float().flatten())
    result, wanted = torch.cat(got), torch.cat(truth)
    if not result.isfinite().all():
        raise RuntimeError("its result is not finite")
    return rel_l1(result, wanted), rel_l2(result, wanted)


def row(
    shape: Shape, peer: str, asked: float, density: float, ms: float, **more: Any
) -> dict[str, Any]:
    return {
        "shape": shape.name,
        "peer": peer,
        "asked_density": asked,
        "density": round(density, 4),
        "ms": round(ms, 3),
        "dense_equivalent_tflops": round(shape.flops() / ms / 1e9, 1),
        "executed_tflops": round(shape.flops(density) / ms / 1e9, 1),
        **{name: round(v, 5) if isinstance(v, float) else v for name, v in more.items()},
    }


def absent_row(shape: Shape, peer: str, asked: float, reason: str) -> dict[str, Any]:
    return {"shape": shape.name, "peer": peer, "asked_density": asked, "absent": reason}

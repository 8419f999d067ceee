# SPDX-License-Identifier: Apache-2.0
"""Rules of a caller's own, written as functions of a call, and their times on a GPU: sparge beside
PyTorch's FlexAttention over the same blocks, and dense attention.

    python -m benchmarks.rules [--shapes wan480,mochi] [--seconds 2] [--out FILE]

One JSON object for each shape and rule: density; ms, of sparge in 8 bits with the rule; flex_ms, of
FlexAttention in bf16 without it, of tokens that lie in the order already; rel_l2 between the two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

import sparge
from sparge import AttentionStats, TokenGrid, TokenOrder, TorchCall, grid_order
from sparge.sdpa import Rule

from .inputs import draw
from .metrics import rel_l2
from .shapes import SHAPES, Shape
from .timing import add_row, commit, gpu_name, median_within, require_kernels


def gaps(order: TokenOrder, grid: TokenGrid) -> Tensor:
    """(query blocks, key blocks, 3): frames, rows and columns that lie between two blocks."""
    queries, keys = order.block_ranges(grid)
    (first_query, end_query), (first_key, end_key) = queries[:, None].unbind(-1), keys.unbind(-1)
    return torch.maximum(first_key - end_query, first_query - end_key).clamp(min=0)


def of_places(order: TokenOrder, near: Tensor) -> Rule:
    """Rule of the self-attention of one grid, for all heads: `near` (query blocks, key blocks)."""

    def rule(call: TorchCall) -> Any:
        q, k = call.query, call.key
        if not q.shape[2] == k.shape[2] == order.tokens:
            return None  # cross-attention, or text alone
        return {"order": order, "block_mask": near.expand(*q.shape[:2], -1, -1)}

    return rule


def sliding_tiles(grid: TokenGrid, window: tuple[int, int, int], device: str) -> Rule:
    """Sliding tiles (STA): blocks see those within a window of frames, rows and columns."""
    order = grid_order(grid).on(device)
    return of_places(order, (gaps(order, grid) < torch.tensor(window, device=device)).all(-1))


def radial(grid: TokenGrid, reach: int, device: str) -> Rule:
    """Radial attention: the further apart two blocks are in time, the nearer in space."""
    order = grid_order(grid).on(device)
    frames, rows, columns = gaps(order, grid).unbind(-1)
    return of_places(order, rows.maximum(columns) * (1 + frames) < reach)


def by_content(grid: TokenGrid, share: float, device: str) -> Rule:
    """Blocks by the products of their means, as VSA's coarse stage: a share for each query block,
    chosen anew in each call."""
    order = grid_order(grid).on(device)
    slots = order.slot_token

    def means(x: Tensor, size: int) -> Tensor:
        rows = x[:, :, slots.clamp(min=0)].masked_fill((slots < 0).unsqueeze(-1), 0)
        rows = pad(rows, (0, 0, 0, -len(slots) % size)).unflatten(2, (-1, size))
        held = pad(slots >= 0, (0, -len(slots) % size)).unflatten(0, (-1, size)).sum(-1)
        return rows.float().sum(3) / held.unsqueeze(-1)

    def rule(call: TorchCall) -> Any:
        q, k = call.query, call.key
        if not q.shape[2] == k.shape[2] == order.tokens:
            return None
        scores = means(q, 128) @ means(k, 64).repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        best = scores.topk(max(1, int(share * order.key_blocks)), -1).indices
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        return {"order": order, "block_mask": kept}

    return rule


def flex_work(order: TokenOrder, kept: Tensor, qkv: Any) -> Callable[[], Tensor]:
    """FlexAttention over the blocks `kept` (1, H, query blocks, key blocks), of tokens as they lie
    in the order; gives (1, H, slots, D)."""
    held = (slots := pad(order.slot_token, (0, -order.slots % 128), value=-1)) >= 0
    kept = kept | order.keys_exact | order.queries_exact.unsqueeze(-1)
    kept = pad(kept, (0, order.slots // 64 % 2))
    whole = held.unflatten(0, (-1, 64)).all(-1)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        return blocks.sum(-1, dtype=torch.int32), blocks.int().argsort(-1, descending=True).int()

    blocks = BlockMask.from_kv_blocks(
        *listed(kept & ~whole),
        *listed(kept & whole),
        BLOCK_SIZE=(128, 64),
        mask_mod=lambda b, h, i, j: held[j],
    )
    given = [x[:, :, slots.clamp(min=0)].contiguous() for x in qkv]
    flex: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: flex(*given, block_mask=blocks, kernel_options={"BLOCK_M": 128, "BLOCK_N": 64})


def timed(shape: Shape, name: str, rule: Any, qkv: Any, seconds: float) -> dict[str, Any]:
    stats, call, options = AttentionStats(qkv[0].device), TorchCall(*qkv), rule(TorchCall(*qkv))
    out, order = sparge.attention(*qkv, stats=stats, **options), options["order"]
    work: dict[str, Callable[[], Tensor]] = {
        "ms": lambda: sparge.attention(*qkv, **rule(call)),
        "flex_ms": flex_work(order, options["block_mask"], qkv),
        "sdpa_ms": lambda: scaled_dot_product_attention(*qkv),
    }
    flex = work["flex_ms"]()[:, :, order.token_slots[0].long()]
    row = {"shape": shape.name, "rule": name, "density": round(stats.density, 4)}
    row |= {field: round(median_within(each, seconds)[0], 3) for field, each in work.items()}
    where = {"gpu": gpu_name(), "torch": torch.__version__, "commit": commit()}
    return row | {"rel_l2": round(rel_l2(out, flex), 4)} | where


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="wan480,mochi", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number")
    parser.add_argument("--out", type=Path, help="a .jsonl file to add rows to")
    options = parser.parse_args()
    require_kernels()
    for shape in (SHAPES[name] for name in options.shapes.split(",")):
        grid, qkv = shape.grid, draw(shape)
        rules = {
            "sliding tiles": sliding_tiles(grid, (4, 8, 8), "cuda"),
            "radial": radial(grid, 16, "cuda"),
            "by content": by_content(grid, 0.2, "cuda"),
        }
        for name, rule in rules.items():
            add_row(timed(shape, name, rule, qkv, options.seconds), options.out)


if __name__ == "__main__":
    main()

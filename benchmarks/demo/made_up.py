# SPDX-License-Identifier: Apache-2.0
"""Dense and sparse attention side by side on a video-like example: a table and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

import sparge
from benchmarks.demo.device import timed
from benchmarks.pixels import to_image
from benchmarks.video_like import HEAD_KINDS, VideoLike, video_like
from sparge.blocks import KEY_BLOCK, QUERY_BLOCK
from sparge.common.metrics import cosine, rel_l1, rel_l2

SHARES = (1.0, 0.5, 0.3, 0.2, 0.1)
PVTHRESHD = 15.0  # the node's default
SHOWN_SHARE = 0.3
ERROR_GAIN = 8
REPEATS = 10  # timed calls on a GPU, whose median counts
TILE = 320  # pixels a picture panel is at least scaled up to
KEPT, DROPPED, MARGIN = (1.0, 0.69, 0.0), (0.094, 0.11, 0.173), 8


@dataclass(frozen=True)
class Size:
    grid: tuple[int, int, int]
    text_tokens: int
    heads: int
    head_dim: int


# Sizes: Mochi at 848 x 480 with 163 frames, and what a CPU does in well under a minute.
GPU_SIZE = Size((28, 30, 53), 256, 24, 128)
CPU_SIZE = Size((6, 20, 32), 64, 6, 64)


@dataclass(frozen=True)
class Row:
    name: str
    density: float
    pv_skipped: float
    milliseconds: float
    rel_l1: float
    rel_l2: float
    cosine: float

    @classmethod
    def of(
        cls, name: str, density: float, skipped: float, ms: float, out: Tensor, truth: Tensor
    ) -> Row:
        errors = (rel_l1(out, truth), rel_l2(out, truth), cosine(out, truth))
        return cls(name, density, skipped, ms, *errors)


def run(size: Size, device: torch.device, seed: int, out: Path) -> list[Row]:
    example = video_like(
        size.grid,
        size.heads,
        size.head_dim,
        text_tokens=size.text_tokens,
        seed=seed,
        device=device,
    )
    frames, rows, columns = size.grid
    print(
        f"Example: {frames} x {rows} x {columns} latent grid + {size.text_tokens} text tokens = "
        f"{example.q.shape[2]} tokens, {size.heads} heads of {size.head_dim}, bf16"
    )
    truth = scaled_dot_product_attention(example.q.float(), example.k.float(), example.v.float())
    table = [_torch_row(example, truth)]
    table += [_sparge_row(example, truth, share) for share in SHARES]
    print(_formatted(table))
    path = out / "attention.png"
    to_image(_picture(example, truth)).save(path)
    kinds = ", ".join(dict.fromkeys(example.kinds))
    print(
        f"Picture: {path}. A row for each kind of head ({kinds}); from the left: block map (row = "
        f"{QUERY_BLOCK} queries, column = {KEY_BLOCK} keys, "
        f"kept blocks bright), one value channel of the middle frame dense, the same at topk "
        f"{SHOWN_SHARE:g}, their difference x {ERROR_GAIN}."
    )
    return table


def _policy(example: VideoLike, share: float) -> sparge.SparsePolicy:
    return sparge.SparsePolicy(topk=share, pvthreshd=PVTHRESHD, exact_suffix=example.text_tokens)


def _torch_row(example: VideoLike, truth: Tensor) -> Row:
    q, k, v = example.q, example.k, example.v
    out, ms = timed(lambda: scaled_dot_product_attention(q, k, v), q.device, REPEATS)
    return Row.of("torch, dense bf16", 1.0, 0.0, ms, out, truth)


def _sparge_row(example: VideoLike, truth: Tensor, share: float) -> Row:
    policy, device = _policy(example, share), example.q.device
    stats = sparge.AttentionStats(device)
    out, ms = timed(lambda: _attention(example, policy, stats=stats), device, REPEATS)
    skipped = stats.pv_skipped_share
    return Row.of(f"sparge, topk {share:g}", stats.density, skipped, ms, out, truth)


def _attention(example: VideoLike, policy: sparge.SparsePolicy, **named: Any) -> Tensor:
    out = sparge.attention(example.q, example.k, example.v, policy, **named)
    assert isinstance(out, Tensor)  # a pair only when the log-sum-exp is asked for
    return out


def _formatted(table: list[Row]) -> str:
    lines = [
        "",
        "                     density  PV skipped    time ms    rel L1    rel L2    cosine",
    ]
    for row in table:
        lines.append(
            f"{row.name:20} {row.density:7.1%} {row.pv_skipped:11.1%} {row.milliseconds:10.2f} "
            f"{row.rel_l1:9.5f} {row.rel_l2:9.5f} {row.cosine:9.6f}"
        )
    return "\n".join([*lines, "Errors are against dense attention in float32.", ""])


def _picture(example: VideoLike, truth: Tensor) -> Tensor:
    """(height, width, 3) in [0, 1]: a row of panels for each kind of head."""
    policy = _policy(example, SHOWN_SHARE)
    plan = sparge.make_plan(example.q, example.k, policy)
    sparse = _attention(example, policy, plan=plan)
    shown = {kind: head for head, kind in reversed(list(enumerate(example.kinds)))}
    order = [
        shown[kind] for kind in dict.fromkeys(kind.name for kind in HEAD_KINDS) if kind in shown
    ]
    bands = []
    for head in order:
        dense_frame, sparse_frame = (_middle_frame(x, head, example) for x in (truth, sparse))
        low, high = dense_frame.min(), dense_frame.max()
        unit = (high - low).clamp(min=1e-6)
        error = ((dense_frame - sparse_frame).abs() / unit * ERROR_GAIN).clamp(0, 1)
        grays = [(dense_frame - low) / unit, (sparse_frame - low) / unit, error]
        panels = [_map_panel(plan.kept()[0, head]), *(_gray_panel(gray) for gray in grays)]
        tallest = max(panel.shape[0] for panel in panels)
        bands.append(torch.cat([_framed(panel, tallest) for panel in panels], 1))
    return torch.cat(bands)


def _middle_frame(out: Tensor, head: int, example: VideoLike) -> Tensor:
    """Value channel 0, which is the picture itself, as (rows, columns) float32 on the CPU."""
    frames, rows, columns = example.grid
    start = frames // 2 * rows * columns
    return out[0, head, start : start + rows * columns, 0].float().cpu().reshape(rows, columns)


def _map_panel(kept: Tensor) -> Tensor:
    """Panel of a block map. A key block is half as long as a query block: twice the lines make it
    square."""
    colors = torch.tensor([DROPPED, KEPT])
    zoom = max(1, TILE // kept.shape[1])
    return _zoomed(colors[kept.cpu().long()], 2 * zoom, zoom)


def _gray_panel(values: Tensor) -> Tensor:
    zoom = max(1, TILE // max(values.shape))
    return _zoomed(values.unsqueeze(-1).expand(-1, -1, 3), zoom, zoom)


def _zoomed(panel: Tensor, lines: int, columns: int) -> Tensor:
    return panel.repeat_interleave(lines, 0).repeat_interleave(columns, 1)


def _framed(panel: Tensor, height: int) -> Tensor:
    below = height - panel.shape[0] + MARGIN
    return pad(panel, (0, 0, MARGIN, MARGIN, MARGIN, below), value=1.0)

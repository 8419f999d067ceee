# SPDX-License-Identifier: Apache-2.0
"""One attention call, dense and sparse: the heads of all layers of a sampled clip side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparge
from benchmarks.demo.device import timed
from benchmarks.kept import kept_blocks
from benchmarks.metrics import cosine, rel_l1, rel_l2
from benchmarks.quality.dit import DenseRun
from sparge.blocks import KEY_BLOCK, QUERY_BLOCK

SHARES = (1.0, 0.5, 0.3, 0.2, 0.1)
SHOWN_SHARE, SHOWN_HEADS = 0.3, 4
ERROR_GAIN = 2
REPEATS = 10  # timed calls on a GPU, whose median counts

Qkv = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    name: str
    density: float
    pv_skipped: float
    milliseconds: float
    rel_l1: float
    rel_l2: float
    cosine: float

    def __str__(self) -> str:
        return (
            f"{self.name:20} {self.density:7.1%} {self.pv_skipped:11.1%} {self.milliseconds:10.2f} "
            f"{self.rel_l1:9.5f} {self.rel_l2:9.5f} {self.cosine:9.6f}"
        )


def run(dense: DenseRun, out: Path) -> list[Row]:
    layers = [call.layer for call in dense.measured_calls]
    q, k, v = (torch.cat([getattr(layer, part) for layer in layers], 1) for part in "qkv")
    heads = (slice(head, head + 1) for head in range(q.shape[1]))
    truth = torch.cat(
        [
            scaled_dot_product_attention(q[:, h].float(), k[:, h].float(), v[:, h].float())
            for h in heads
        ],
        1,
    )
    print(f"One call: {q.shape[2]} tokens, {q.shape[1]} heads of {q.shape[3]}, bf16\n")
    print("                     density  PV skipped    time ms    rel L1    rel L2    cosine")
    table = [_row(None, (q, k, v), truth)]
    table += [_row(_policy(share), (q, k, v), truth) for share in SHARES]
    print("\n".join(map(str, table)) + "\nErrors are against dense attention in float32.\n")
    path = out / "attention.png"
    _picture((q, k, v), truth, dense).savefig(path)
    print(
        f"Picture: {path}. A row for each of some heads; from the left: block map (row = "
        f"{QUERY_BLOCK} queries, column = {KEY_BLOCK} keys, kept blocks bright), one value channel "
        f"of the middle frame dense, the same at topk {SHOWN_SHARE:g}, their difference x "
        f"{ERROR_GAIN}."
    )
    return table


def _policy(share: float) -> sparge.SparsePolicy:
    return sparge.SparsePolicy(topk=share)


def _row(policy: sparge.SparsePolicy | None, qkv: Qkv, truth: Tensor) -> Row:
    """Row of a policy; without one that of torch."""
    device = truth.device
    stats = sparge.AttentionStats(device)
    if policy is None:
        out, ms = timed(lambda: scaled_dot_product_attention(*qkv), device, REPEATS)
        figures = ("torch, dense bf16", 1.0, 0.0, ms)
    else:
        out, ms = timed(lambda: sparge.attention(*qkv, policy, stats=stats), device, REPEATS)
        figures = (f"sparge, topk {policy.topk:g}", stats.density, stats.pv_skipped_share, ms)
    return Row(*figures, rel_l1(out, truth), rel_l2(out, truth), cosine(out, truth))


def _picture(qkv: Qkv, truth: Tensor, dense: DenseRun) -> Figure:
    policy = _policy(SHOWN_SHARE)
    kept, sparse = kept_blocks(*qkv[:2], policy), sparge.attention(*qkv, policy)
    heads = torch.linspace(0, truth.shape[1] - 1, SHOWN_HEADS).long().tolist()
    figure = Figure(figsize=(16, 4 * len(heads)), layout="constrained")
    for axes, head in zip(figure.subplots(len(heads), 4, squeeze=False), heads, strict=True):
        frames = [_middle_frame(x, head, dense) for x in (truth, sparse)]
        error = (frames[0] - frames[1]).abs() * ERROR_GAIN + frames[0].min()
        low, high = float(frames[0].min()), float(frames[0].max())
        axes[0].imshow(kept[0, head].cpu().numpy(), aspect="auto", interpolation="nearest")
        for panel, shown in zip(axes[1:], (*frames, error), strict=True):
            panel.imshow(shown.numpy(), cmap="gray", vmin=low, vmax=high)
        for panel in axes:
            panel.set_axis_off()
    return figure


def _middle_frame(out: Tensor, head: int, dense: DenseRun) -> Tensor:
    """Value channel 0 as (rows, columns) float32 on the CPU."""
    grid = dense.grid
    frames = out[0, head, :, 0].float().cpu().view(grid.frames, grid.height, grid.width)
    return frames[grid.frames // 2]

# SPDX-License-Identifier: Apache-2.0
"""The op `score` in torch, for CPUs and as the truth of its kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.blocks import unpack
from sparge.common.partial import Partial
from sparge.kernels import Element
from sparge.reference.arithmetic import LOG2_E
from sparge.stages.workspace import CallShape, WorkspaceLayout, layout_of
from sparge.tune.scoring import distances


def score_by_reference(
    exact_out: Tensor,
    exact_max: Tensor,
    exact_sum: Tensor,
    q: Tensor,
    workspace: Tensor,
    shape: list[int],
    element: int,
    kept: Tensor,
    scale: float,
    found: Tensor,
) -> None:
    """Shapes as in `ScoreParams` of csrc/params.cuh; in float64 where `exact_out` is."""
    exact = [
        Partial(exact_out[:, :, bucket], exact_max[:, :, bucket], exact_sum[:, :, bucket])
        for bucket in range(exact_out.shape[2])
    ]
    layout = layout_of(CallShape(*shape), Element(element), False, True)
    dropped = ~unpack(kept, layout.shape.key_blocks)
    pooled = _pooled(q.to(exact_out.dtype), workspace, layout, dropped, scale)
    values = layout.view(workspace, "v_mean")[..., : q.shape[-1]]
    mean = values.repeat_interleave(q.shape[1] // values.shape[1], 1).unsqueeze(2)
    found.copy_(distances(exact, pooled, mean).packed())


def _pooled(
    q: Tensor, workspace: Tensor, layout: WorkspaceLayout, dropped: Tensor, scale: float
) -> list[Partial]:
    """(B, H, S x rows, ...) of each density but the last, by what each has dropped (B, H,
    densities - 1, S, nk)."""
    heads, channels = q.shape[1], q.shape[-1]

    def of_heads(name: str) -> Tensor:
        field = layout.view(workspace, name).to(q.dtype)
        return field.repeat_interleave(heads // field.shape[1], 1)

    keys, values = (of_heads(name)[..., :channels] for name in ("k_block_mean", "v_block_mean"))
    values = values + of_heads("v_mean")[..., None, :channels]
    bias = of_heads("key_counts").log2().unsqueeze(2)
    logits = q @ keys.transpose(-1, -2) * (scale * LOG2_E) + bias
    rows = dropped.movedim(2, 0).repeat_interleave(q.shape[2] // dropped.shape[3], -2)
    logits = logits.masked_fill(~rows, -torch.inf)
    row_max = logits.amax(-1).clamp(min=-1e30)
    weights = (logits - row_max.unsqueeze(-1)).exp2()
    sums = zip(weights @ values, row_max, weights.sum(-1), strict=True)
    return [Partial(*of_density) for of_density in sums]

# SPDX-License-Identifier: Apache-2.0
"""`Measuring.score` in torch, for CPUs and as the truth of its kernel."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from sparge.blocks import unpack
from sparge.kernels import Element
from sparge.reference.attend import LOG2_E
from sparge.stages.workspace import CallShape, WorkspaceLayout
from tests.oracle.sums import Partial

LOG_2 = 0.6931471805599453  # a unit of row_max in natural logs


def fields_of(densities: int) -> int:
    """Number of values that a row has in `found`, as `measure_kernels` reads them."""
    return densities + 5 * (densities - 1) + 2


def score_by_reference(
    exact: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    workspace: Tensor,
    shape: CallShape,
    element: Element,
    kept: Tensor,
    scale: float,
    found: Tensor,
) -> None:
    """Shapes as in `ScoreParams` of csrc/params.cuh; in float64 where `exact_out` is."""
    exact_out, exact_max, exact_sum = exact
    buckets = range(exact_out.shape[2])
    parts = [Partial(exact_out[:, :, n], exact_max[:, :, n], exact_sum[:, :, n]) for n in buckets]
    layout = WorkspaceLayout(shape, element, False, True)
    dropped = ~unpack(kept, layout.shape.key_blocks)
    pooled = _pooled(q.to(exact_out.dtype), workspace, layout, dropped, scale)
    values = layout.view(workspace, "v_mean")[..., : q.shape[-1]]
    mean = values.repeat_interleave(q.shape[1] // values.shape[1], 1).unsqueeze(2)
    kept_parts = list(accumulate(parts, Partial.plus))
    truth = kept_parts[-1].output()
    e, p = (torch.stack([part.output() - truth for part in x]) for x in (kept_parts, pooled))
    m = (mean - truth).expand_as(e)
    logs = torch.stack(
        [_log_sum(a) - _log_sum(r) for a, r in zip(kept_parts[:-1], pooled, strict=True)]
    )
    found.copy_(
        torch.cat(
            [
                (e * e).sum(-1),
                (e[:-1] * p).sum(-1),
                (p * p).sum(-1),
                logs,
                (e[:-1] * m[:-1]).sum(-1),
                (p * m[:-1]).sum(-1),
                torch.stack([truth.square().sum(-1), (m[0] * m[0]).sum(-1)]),
            ]
        )
    )


def _log_sum(part: Partial) -> Tensor:
    return part.row_sum.log() + LOG_2 * part.row_max


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

# SPDX-License-Identifier: Apache-2.0
"""Pooled keys and the output scale, which make up for dropped blocks.

A dropped block takes part in the softmax as one pseudo-key: its mean key, with the weight of all
its keys times the pool weight of the head, and its mean value. Pseudo-keys come last, in tiles of
64, and no filter leaves them out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import QUERY_BLOCK
from ..policy import PerHead
from .arithmetic import E4M3_MAX, INT8_MAX, Values
from .partial import NO_LOGIT, Partial, finite
from .quantize import stored
from .quantized import Quantized, by_query_head

LEAST_VALUE_SCALE = 2.0**-20
POOL_TILE = 64  # pseudo-keys in a tile, which is shaped like a key block


@dataclass(frozen=True, eq=False)
class Pool:
    """Pseudo-keys of all blocks for one query head, as float32."""

    k: Tensor  # (nk, D) levels
    k_scale: Tensor  # (nk,), one a pseudo-key
    bias: Tensor  # (nk,) log2 of keys times pool weight times value scale
    v: Tensor  # (nk, D) in units of the channels' scales times the value scale
    v_scale: Tensor  # (nk,), 1 where values are no integers
    values: Values

    @classmethod
    def of(cls, x: Quantized, b: int, h: int, values: Values, pool_weight: Tensor) -> Pool:
        means = x.v_block_mean[b, h] / values.scale
        v_scale = torch.ones_like(means[:, 0])
        if values.arithmetic.integer_pv:
            v_scale = (means.abs().amax(-1) / E4M3_MAX).clamp(min=LEAST_VALUE_SCALE)
            step = v_scale.unsqueeze(-1) * (E4M3_MAX / INT8_MAX)
            means = values.arithmetic.round(means / step).float() * (E4M3_MAX / INT8_MAX)
        levels, scale = stored(x.k_block_mean[b, h].unsqueeze(1), values.arithmetic)
        return cls(
            levels.squeeze(1).float(),
            scale,
            (x.key_counts[b] * pool_weight * v_scale).log2(),
            means if values.arithmetic.integer_pv else values.arithmetic.round(means).float(),
            v_scale,
            values,
        )

    def attend(self, q: Tensor, factors: Tensor, pooled: Tensor, start: Tensor) -> Partial:
        """Rows q (R, D) over the blocks `pooled` (nk,) bool; `start` (R,): maximum met before."""
        logits = q @ self.k.T * (factors.unsqueeze(-1) * self.k_scale) + self.bias
        logits = logits.masked_fill(~pooled, NO_LOGIT)
        step = self.values.softmax.step_blocks * POOL_TILE
        spare = -logits.shape[1] % step
        tiles = pad(logits, (0, spare), value=NO_LOGIT).unflatten(-1, (-1, step))
        running = torch.maximum(tiles.amax(-1).cummax(-1).values, start.unsqueeze(-1))
        exponents = tiles - finite(running).unsqueeze(-1)
        worth = pad(1 / self.v_scale, (0, spare), value=1).unflatten(0, (-1, step))
        return self.values.sums(exponents, running, pad(self.v, (0, 0, 0, spare)), worth=worth)


def with_output_scale(
    out: Tensor, row_sum: Tensor, x: Quantized, kept: Tensor, output_scale: PerHead
) -> Tensor:
    """Scales the distance of out (B, H, Nq, D) from the mean value by `output_scale`, in query
    blocks that drop something. Rows that met no key (row_sum 0) stay 0."""
    factor = torch.as_tensor(output_scale, dtype=torch.float32, device=kept.device)
    if (factor == 1).all():
        return out
    drops = ((x.key_counts > 0)[:, None, None] & ~kept).any(-1)
    of_block = factor.expand(x.heads)[:, None].masked_fill(~drops, 1)
    rows = torch.arange(x.n_queries, device=kept.device) // QUERY_BLOCK
    of_row = of_block[..., rows].masked_fill(row_sum == 0, 1).unsqueeze(-1)
    mean_value = by_query_head(x.vbar, x.heads).unsqueeze(2)
    return torch.lerp(mean_value.expand_as(out), out, of_row.expand_as(out))

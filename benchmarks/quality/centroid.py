# SPDX-License-Identifier: Apache-2.0
"""The residual of Sol-Attn and ComfyUI's `sol_attn`: one pooled term for a whole query block."""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.plan.blocks import QUERY_BLOCK
from sparge.reference.attend import LOG2_E
from sparge.reference.packed import Packed
from sparge.reference.partial import NO_LOGIT, Partial, finite
from sparge.reference.pooled import attend_packed
from sparge.reference.route import block_scores


def attend_with_centroids(
    packed: Packed, kept: Tensor, dropped: Tensor, *, scale: float, is_causal: bool = False
) -> Tensor:
    """Attention by slot (B, H, Nq, D): over `kept`, and over `dropped` as if every query were the
    mean of its block.

    Both maps are (B, H, nq, nk) bool. A dropped block of n keys adds n exp(qbar . kbar_j) to the
    row sum and as much of mean(V_j) to the output of every row, in float32. Under causal none may
    be dropped that some row sees in part: the diagonal is kept.
    """
    exact = attend_packed(packed, kept, scale=scale, is_causal=is_causal)
    part = Partial(exact.unnormalised, exact.row_max, exact.row_sum)
    tail = _tail(packed, dropped, scale)
    block = torch.arange(exact.out.shape[2], device=kept.device) // QUERY_BLOCK
    by_row = (x.index_select(2, block) for x in (tail.unnormalised, tail.row_max, tail.row_sum))
    return part.plus(Partial(*by_row)).output()


def _tail(packed: Packed, dropped: Tensor, scale: float) -> Partial:
    """One row a query block: (B, H, nq, D) and (B, H, nq)."""
    operands = packed.operands
    group = operands.heads // operands.kv_heads
    keys = operands.key_counts.float().log2()[:, None, None]
    logits = (block_scores(operands, scale) * LOG2_E + keys).masked_fill(~dropped, NO_LOGIT)
    top = logits.amax(-1)
    weight = torch.exp2(logits - finite(top).unsqueeze(-1))
    values = packed.v_block_mean + operands.vbar.unsqueeze(2)
    return Partial(weight @ values.repeat_interleave(group, 1), top, weight.sum(-1))

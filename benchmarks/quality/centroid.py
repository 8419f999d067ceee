# SPDX-License-Identifier: Apache-2.0
"""Pooled term of Sol-Attn and ComfyUI's `sol_attn`: one for a whole query block."""

from __future__ import annotations

import torch
from torch import Tensor

from sparge.blocks import QUERY_BLOCK
from sparge.reference.attend import LOG2_E
from sparge.reference.packed import Packed
from sparge.reference.partial import NO_LOGIT, Partial, finite
from sparge.reference.route import block_scores


def centroids(packed: Packed, dropped: Tensor, *, scale: float) -> Partial:
    """Attention by slot (B, H, Nq, D) over the blocks `dropped` (B, H, nq, nk) bool, as if every
    query were the mean of its block.

    A block of n keys adds n exp(qbar . kbar_j) to the row sum and as much of mean(V_j) to the
    output of every row, in float32. Under causal no block may be among them that some row sees in
    part: the diagonal is kept.
    """
    tail = _tail(packed, dropped, scale)
    block = torch.arange(packed.operands.n_queries, device=dropped.device) // QUERY_BLOCK
    by_row = (x.index_select(2, block) for x in (tail.unnormalised, tail.row_max, tail.row_sum))
    return Partial(*by_row)


def _tail(packed: Packed, dropped: Tensor, scale: float) -> Partial:
    """Term with one row a query block: (B, H, nq, D) and (B, H, nq)."""
    operands = packed.operands
    group = operands.heads // operands.kv_heads
    keys = operands.key_counts.float().log2()[:, None, None]
    logits = (block_scores(operands, scale) * LOG2_E + keys).masked_fill(~dropped, NO_LOGIT)
    top = logits.amax(-1)
    weight = torch.exp2(logits - finite(top).unsqueeze(-1))
    values = packed.v_block_mean + operands.vbar.unsqueeze(2)
    return Partial(weight @ values.repeat_interleave(group, 1), top, weight.sum(-1))

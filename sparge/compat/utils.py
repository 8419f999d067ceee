# SPDX-License-Identifier: Apache-2.0
"""Upstream's block maps, which others change and give to `block_sparse_sage2_attn_cuda`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK, QUERY_BLOCK
from ..checks.validate import as_heads_first, check_pair
from ..errors import Unsupported
from ..policy import PerHead, SparsePolicy
from ..reference import Operands, route
from ..stages.as_written import as_written
from .core import meansim_policy

__all__ = ["get_block_map_meansim", "get_block_map_meansim_fuse_quant"]


@torch.no_grad()
def get_block_map_meansim(
    q: Tensor,
    k: Tensor,
    is_causal: bool = False,
    BLKQ: int = 128,  # noqa: N803
    BLKK: int = 64,  # noqa: N803
    simthreshd1: PerHead = 0.1,
    cdfthreshd: PerHead | None = 0.9,
    topk: PerHead | None = None,
    is_sparse: bool = True,
    return_lut: bool = False,
    attention_sink: bool = False,
) -> Tensor:
    """Bool map (B, H, ceil(Nq / 128), ceil(Nk / 64)) of the blocks that the thresholds keep.

    q (B, H, Nq, D) and k (B, Hkv, Nk, D). k is pooled as it comes: subtract its mean before, as
    attention does. The reference chooses, on the tensors' device, a head at a time.
    """
    if (BLKQ, BLKK) != (QUERY_BLOCK, KEY_BLOCK) or return_lut or not is_sparse:
        raise Unsupported(
            f"BLKQ is {BLKQ}, BLKK {BLKK}, return_lut {return_lut} and is_sparse {is_sparse}; maps "
            f"of {QUERY_BLOCK} x {KEY_BLOCK} tokens a block are served on every GPU, without "
            "lookup tables, and with is_sparse=True: give the map to block_sparse_sage2_attn_cuda."
        )
    q, k = as_heads_first("q", q, "HND"), as_heads_first("k", k, "HND")
    check_pair(q, k)
    if is_causal and q.shape[2] != k.shape[2]:
        raise Unsupported(
            f"is_causal with {q.shape[2]} queries and {k.shape[2]} keys does not say which keys a "
            "query sees: give as many keys as queries."
        )
    policy = meansim_policy(
        topk, cdfthreshd, simthreshd1, attention_sink=attention_sink, smooth_k=False
    )
    policy.head_thresholds(q.shape[1], q.device)  # refuses tensors of other numbers of heads
    with as_written(q.device):
        return torch.cat([_kept(q, k, head, policy, is_causal) for head in range(k.shape[1])], 1)


def get_block_map_meansim_fuse_quant(
    q: Tensor,
    k: Tensor,
    km: Tensor | None = None,
    is_causal: bool = False,
    BLKQ: int = 128,  # noqa: N803
    BLKK: int = 64,  # noqa: N803
    **thresholds: Any,
) -> tuple[Tensor, None, None, None, None]:
    """Map of q and k - km as `get_block_map_meansim` gives it. None stands for q and k in INT8 and
    their scales, which only upstream's kernels read."""
    k = k if km is None else k - km
    kept = get_block_map_meansim(q, k, is_causal, BLKQ, BLKK, **thresholds)
    return kept, None, None, None, None


def _kept(q: Tensor, k: Tensor, head: int, policy: SparsePolicy, is_causal: bool) -> Tensor:
    """Map of the query heads of one KV head: float32 copies of all would take much memory."""
    group = q.shape[1] // k.shape[1]
    heads, keys = slice(head * group, (head + 1) * group), k[:, head : head + 1]
    thresholds = {name: x[heads] for name, x in policy.per_head.items() if x.ndim}
    # Values have no say: one channel in their place takes the least memory.
    x = Operands.of(q[:, heads], keys, keys[..., :1], smooth_k=False)
    policy = replace(policy, **thresholds)
    return route(x, policy, scale=x.head_dim**-0.5, is_causal=is_causal).kept

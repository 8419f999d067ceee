# SPDX-License-Identifier: Apache-2.0
"""Upstream's block maps, which others change and give to `block_sparse_sage2_attn_cuda`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK, QUERY_BLOCK
from ..checks.argument import flag
from ..checks.validate import as_heads_first, check_pair
from ..errors import Unsupported
from ..policy import PV_FILTER_OFF, PerHead
from ..reference.quantize import quantize_qkv
from ..reference.route import route
from ..stages.as_written import as_written
from .core import meansim_policy

__all__ = ["get_block_map_meansim"]


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
    if (BLKQ, BLKK) != (QUERY_BLOCK, KEY_BLOCK):
        raise Unsupported(
            f"BLKQ is {BLKQ} and BLKK {BLKK}; a block is {QUERY_BLOCK} queries and {KEY_BLOCK} "
            f"keys here, on every GPU: pass BLKQ={QUERY_BLOCK} and BLKK={KEY_BLOCK}."
        )
    if return_lut:
        raise Unsupported(
            "return_lut is True; there are no lookup tables here: take the map, and give it to "
            "block_sparse_sage2_attn_cuda."
        )
    if not is_sparse:
        raise Unsupported("is_sparse is False, which never had an effect: pass True, or topk=1.")
    q, k = as_heads_first("q", q, "HND"), as_heads_first("k", k, "HND")
    check_pair(q, k)
    is_causal = flag("is_causal", is_causal)
    if is_causal and q.shape[2] != k.shape[2]:
        raise Unsupported(
            f"is_causal with {q.shape[2]} queries and {k.shape[2]} keys does not say which keys a "
            "query sees: give as many keys as queries."
        )
    policy = meansim_policy(topk, cdfthreshd, simthreshd1, PV_FILTER_OFF, attention_sink, False)
    policy.head_thresholds(q.shape[1], q.device)  # refuses tensors of other numbers of heads
    with as_written(q.device):
        # Values have no say: one channel in their place takes the least memory.
        x = quantize_qkv(q, k, k[..., :1], smooth_k=False)
        return route(x, policy, scale=x.head_dim**-0.5, is_causal=is_causal).kept

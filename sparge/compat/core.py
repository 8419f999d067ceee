# SPDX-License-Identifier: Apache-2.0
"""Upstream's attention functions, under their names, parameters and order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import attention
from ..errors import Unsupported
from ..policy import PerHead, SparsePolicy
from ..stats import AttentionStats
from .mask import read_block_mask

__all__ = [
    "block_sparse_sage2_attn_cuda",
    "get_cuda_arch_versions",
    "spas_sage2_attn_meansim_cuda",
    "spas_sage2_attn_meansim_topk_cuda",
    "spas_sage_attn_meansim_cuda",
    "spas_sage_attn_meansim_topk_cuda",
]

#: Output; and with it the sparsity, the log-sum-exp or both, where they are asked for.
Result = Tensor | tuple[Any, ...]


def spas_sage2_attn_meansim_topk_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | str | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: PerHead = -0.1,
    cdfthreshd: PerHead | None = None,
    topk: PerHead | None = 0.5,
    pvthreshd: PerHead = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Result:
    """Attention that keeps, for each 128 queries, a share `topk` of all blocks of 64 keys.

    q (B, H, Nq, D), k and v (B, Hkv, Nk, D) in layout "HND", tokens before heads in "NHD"; bf16,
    fp16 or fp32. Thresholds are numbers or tensors (H,). Exactly one of `topk` and `cdfthreshd` is
    set. Returns the output in q's layout, and behind it in a tuple the sparsity with
    `return_sparsity` and the natural log-sum-exp (B, H, Nq) with `return_lse`.

    In place of `attn_mask`, which upstream never reads, engines give the layout; it may be that of
    `tensor_layout`.
    """
    policy = meansim_policy(topk, cdfthreshd, simthreshd1, pvthreshd, attention_sink, smooth_k)
    is_layout = isinstance(attn_mask, str) and attn_mask == tensor_layout
    refuse_mask_and_dropout(None if is_layout else attn_mask, dropout_p)
    return _attend(
        q, k, v, policy, is_causal, scale, None, tensor_layout, output_dtype, return_sparsity,
        return_lse,
    )  # fmt: skip


def spas_sage2_attn_meansim_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | str | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: PerHead = 0.6,
    cdfthreshd: PerHead = 0.98,
    pvthreshd: PerHead = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Result:
    """Attention that keeps the best blocks up to a cumulative mass of `cdfthreshd`; otherwise as
    `spas_sage2_attn_meansim_topk_cuda`."""
    return spas_sage2_attn_meansim_topk_cuda(
        q, k, v, attn_mask, dropout_p, is_causal, scale, smooth_k, simthreshd1, cdfthreshd, None,
        pvthreshd, attention_sink, tensor_layout, output_dtype, return_sparsity, return_lse,
    )  # fmt: skip


# Upstream's first generation differs in its kernels only; ours serve both.
spas_sage_attn_meansim_topk_cuda = spas_sage2_attn_meansim_topk_cuda
spas_sage_attn_meansim_cuda = spas_sage2_attn_meansim_cuda


def block_sparse_sage2_attn_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_id: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    smooth_k: bool = True,
    pvthreshd: PerHead = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Result:
    """Attention over the blocks that `mask_id` (B, H, ceil(Nq / 128), ceil(Nk / 64)) marks nonzero.

    Masks of 64 x 128 blocks, which upstream takes on Hopper, are read as `read_block_mask` says.
    `attention_sink` adds the first block of 64 keys for every query.
    """
    refuse_mask_and_dropout(None, dropout_p)
    mask = read_block_mask(mask_id, q, k, tensor_layout)
    if attention_sink:
        mask[..., 0] = True
    policy = SparsePolicy(smooth_k=smooth_k, pvthreshd=_threshold(pvthreshd))
    return _attend(
        q, k, v, policy, False, scale, mask, tensor_layout, output_dtype, return_sparsity,
        return_lse,
    )  # fmt: skip


def get_cuda_arch_versions() -> list[str]:
    """Names of the GPUs of this process, such as "sm89", by index."""
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return [f"sm{major}{minor}" for major, minor in capabilities]


def meansim_policy(
    topk: PerHead | None,
    cdfthreshd: PerHead | None,
    simthreshd1: PerHead,
    pvthreshd: PerHead,
    attention_sink: bool,
    smooth_k: bool,
) -> SparsePolicy:
    """The policy that upstream's thresholds stand for."""
    if (topk is None) == (cdfthreshd is None):
        raise Unsupported(
            f"topk is {topk} and cdfthreshd is {cdfthreshd}: set exactly one of them and pass "
            "None for the other."
        )
    return SparsePolicy(
        select_by="cdf" if topk is None else "topk",
        topk=0.5 if topk is None else _threshold(topk),
        cdfthreshd=1.0 if cdfthreshd is None else _threshold(cdfthreshd),
        simthreshd1=_threshold(simthreshd1),
        pvthreshd=_threshold(pvthreshd),
        attention_sink=attention_sink,
        keep_diagonal=False,
        smooth_k=smooth_k,
    )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy,
    is_causal: bool,
    scale: float | None,
    block_mask: Tensor | None,
    layout: str,
    output_dtype: torch.dtype | None,
    return_sparsity: bool,
    return_lse: bool,
) -> Result:
    stats = AttentionStats(q.device) if return_sparsity else None
    more: list[float | Tensor] = []
    library: Any = attention
    out = library(
        q,
        k,
        v,
        policy,
        layout=layout,
        causal="top-left" if is_causal else None,
        scale=scale,
        block_mask=block_mask,
        stats=stats,
        output_dtype=output_dtype,
        return_lse=return_lse,
    )
    if return_lse:
        out, *more = out
    if stats is not None:
        more.insert(0, 1.0 - stats.density)
    return (out, *more) if more else out


def refuse_mask_and_dropout(attn_mask: Tensor | str | None, dropout_p: float) -> None:
    if isinstance(attn_mask, str):
        raise Unsupported(
            f"attn_mask is {attn_mask!r}, which nobody reads there: give tensor_layout by its name."
        )
    if attn_mask is not None:
        raise Unsupported(
            "attn_mask is given; sparse attention takes no element mask: use is_causal, cut the "
            "padding off, pass a mask_id of blocks, or stay dense."
        )
    if dropout_p != 0:
        raise Unsupported(f"dropout_p is {dropout_p}; there is no dropout here: pass 0.")


def _threshold(value: PerHead) -> PerHead:
    """Turns integer tensors, which upstream accepted, into floating point."""
    return value.float() if isinstance(value, Tensor) else value

# SPDX-License-Identifier: Apache-2.0
"""Upstream's attention functions, and its block masks: 128 x 64 tokens a block, or 64 x 128."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..attention import attention
from ..blocks import KEY_BLOCK, QUERY_BLOCK, block_count
from ..checks.argument import shown
from ..checks.validate import as_heads_first
from ..errors import Unsupported
from ..policy import PerHead, SparsePolicy
from ..stats import AttentionStats

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
    if not isinstance(attn_mask, str) or attn_mask != tensor_layout:
        refuse_mask(attn_mask)
    policy = meansim_policy(
        topk, cdfthreshd, simthreshd1, pvthreshd=pvthreshd, attention_sink=attention_sink,
        smooth_k=smooth_k,
    )  # fmt: skip
    return _attend(
        q, k, v, policy, dropout_p, return_sparsity, return_lse, layout=tensor_layout, scale=scale,
        causal="top-left" if is_causal else None, output_dtype=output_dtype,
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
    mask = read_block_mask(mask_id, q, k, tensor_layout)
    policy = SparsePolicy(smooth_k=smooth_k, pvthreshd=pvthreshd, attention_sink=attention_sink)
    return _attend(
        q, k, v, policy, dropout_p, return_sparsity, return_lse, layout=tensor_layout, scale=scale,
        block_mask=mask, output_dtype=output_dtype,
    )  # fmt: skip


def get_cuda_arch_versions() -> list[str]:
    """Names of the GPUs of this process, such as "sm89", by index."""
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return [f"sm{major}{minor}" for major, minor in capabilities]


def meansim_policy(
    topk: PerHead | None, cdfthreshd: PerHead | None, simthreshd1: PerHead, **others: Any
) -> SparsePolicy:
    """The policy that upstream's thresholds stand for."""
    if (topk is None) == (cdfthreshd is None):
        raise Unsupported(
            f"topk is {topk} and cdfthreshd is {cdfthreshd}: set exactly one of them and pass "
            "None for the other."
        )
    selection: dict[str, Any] = {"select_by": "topk", "topk": topk}
    if topk is None:
        selection = {"select_by": "cdf", "cdfthreshd": cdfthreshd}
    return SparsePolicy(**selection, simthreshd1=simthreshd1, keep_diagonal=False, **others)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: SparsePolicy,
    dropout_p: float,
    return_sparsity: bool,
    return_lse: bool,
    **options: Any,
) -> Result:
    if dropout_p != 0:
        raise Unsupported(f"dropout_p is {dropout_p}; there is no dropout here: pass 0.")
    stats = AttentionStats(q.device) if return_sparsity else None
    found: Any = attention(q, k, v, policy, stats=stats, return_lse=return_lse, **options)
    out, *more = found if return_lse else (found,)
    if stats is not None:
        more.insert(0, 1.0 - stats.density)
    return (out, *more) if more else out


def refuse_mask(attn_mask: object) -> None:
    if attn_mask is not None:
        given = repr(attn_mask) if isinstance(attn_mask, str) else "given"
        raise Unsupported(
            f"attn_mask is {given}; sparse attention takes no element mask, and nothing but the "
            "layout in its place: use is_causal, cut the padding off, pass a mask_id of blocks, or "
            "stay dense; give tensor_layout by its name."
        )


def read_block_mask(mask_id: Tensor | None, q: Tensor, k: Tensor, layout: str) -> Tensor:
    """A new bool mask (B, H, ceil(Nq / 128), ceil(Nk / 64)) that keeps all that `mask_id` keeps.

    `mask_id` of that shape is read as it is. One of shape (B, H, ceil(Nq / 64), ceil(Nk / 128)) has
    Hopper's blocks: a row keeps what either of the two rows it covers keeps, and a column becomes
    two. That is exact where those two rows agree, and keeps more where they do not; what is kept
    counts in the density. Both shapes are one and the same only for a single block of at most 64
    queries and 64 keys, which means the same in either.
    """
    (*heads, queries, _), keys = (as_heads_first(*x, layout).shape for x in (("q", q), ("k", k)))
    takes, hopper = (
        (*heads, block_count(queries, rows), block_count(keys[2], columns))
        for rows, columns in ((QUERY_BLOCK, KEY_BLOCK), (KEY_BLOCK, QUERY_BLOCK))
    )
    shape = tuple(mask_id.shape) if isinstance(mask_id, Tensor) else None
    if mask_id is not None and shape == takes:
        return mask_id != 0
    if mask_id is None or shape != hopper:
        given = shown(mask_id) if shape is None else f"of shape {shape}"
        raise Unsupported(
            f"mask_id is {given}; it is a tensor that says which blocks to keep, of shape {takes}: "
            f"batch, query heads, blocks of {QUERY_BLOCK} queries, blocks of {KEY_BLOCK} keys, or "
            f"{hopper} with blocks of {KEY_BLOCK} queries and {QUERY_BLOCK} keys, on every GPU."
        )
    halves = pad(mask_id != 0, (0, 0, 0, 2 * takes[2] - hopper[2])).unflatten(2, (-1, 2))
    return halves.any(3).repeat_interleave(2, -1)[..., : takes[3]]

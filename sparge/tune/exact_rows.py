# SPDX-License-Identifier: Apache-2.0
"""Exact attention of a few query rows over all keys.

Such a call has too few thread blocks for a GPU, so the keys are cut into parts that are attended to
side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..blocks import block_count
from ..speed.worth import torch_kernel

#: PyTorch's own order depends on who called it first, and the result must not.
ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
#: Fewer keys are served by flash: cuDNN builds a plan for a new shape, for which the GPU waits. In
#: longer calls flash would be slower in each of a run's hundreds of probes (docs/experiments.md,
#: Exact attention of few rows).
FEWEST_KEYS_FOR_CUDNN = 20_000
#: Query rows that a thread block of cuDNN's attention takes.
TILE_ROWS = 128
#: Parts beyond which nothing is gained (docs/experiments.md, Parts of the keys).
MOST_PARTS = 4
#: Share of the time in one part: more is not worth the merging.
WORTH = 0.7


def attend_rows(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """(B, H, rows, D) float32: q (B, H, rows, D) attending to k, v (B, Hkv, N, D)."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    if q.is_cuda and k.shape[2] < FEWEST_KEYS_FOR_CUDNN:
        return attend_one_by_one(q, k, v, scale)
    if k.shape[1] == q.shape[1] and q.is_cuda and torch_kernel(q, k, v, ORDER) == "cudnn":
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        parts = part_count(q.shape[1] * block_count(q.shape[2], TILE_ROWS), k.shape[2], sms)
        if parts > 1 and _is_one_batch(k) and _is_one_batch(v):
            return attend_in_parts(q, k, v, scale, parts)
    gqa = k.shape[1] != q.shape[1]
    with sdpa_kernel(ORDER, set_priority=True):
        return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=gqa).float()


def attend_one_by_one(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Computes `attend_rows` without cuDNN, an entry at a time: how flash splits the keys depends
    on the size of the batch, and the result must not."""
    entries, gqa = zip(q.split(1), k.split(1), v.split(1), strict=True), k.shape[1] != q.shape[1]
    with sdpa_kernel(ORDER[1:], set_priority=True):
        outs = [scaled_dot_product_attention(*qkv, scale=scale, enable_gqa=gqa) for qkv in entries]
    return torch.cat(outs).float()


def part_count(tiles: int, keys: int, sms: int) -> int:
    """Number of equal parts that the keys are cut into, for so many tiles of query rows of one
    batch entry. ComfyUI may compute entries together or apart, and the result must not depend on
    it."""

    def time(parts: int) -> float:
        return block_count(tiles * parts, sms) / parts

    fastest = min((n for n in range(1, MOST_PARTS + 1) if keys % n == 0), key=time)
    return fastest if time(fastest) <= WORTH * time(1) else 1


def attend_in_parts(q: Tensor, k: Tensor, v: Tensor, scale: float | None, parts: int) -> Tensor:
    """Computes `attend_rows` in parts, for as many key and value heads as query heads and a number
    of keys that is a multiple of `parts`. A GPU takes cuDNN, because PyTorch's public call does not
    tell the sums of weights."""
    q_parts = q.unsqueeze(1).expand(-1, parts, -1, -1, -1).flatten(0, 1)
    k_parts, v_parts = (x.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1) for x in (k, v))
    aten = torch.ops.aten
    if q.is_cuda:
        found = aten._scaled_dot_product_cudnn_attention(
            q_parts, k_parts, v_parts, None, compute_log_sumexp=True, scale=scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu(
            q_parts, k_parts, v_parts, scale=scale
        )
    out = found[0].unflatten(0, (-1, parts))
    weights = found[1].view(out.shape[:-1]).softmax(1)
    return (out * weights.unsqueeze(-1)).sum(1)


def _is_one_batch(x: Tensor) -> bool:
    """Whether parts of the tokens (dimension 2) of batch entries are a batch without a copy."""
    return x.shape[0] == 1 or x.stride(0) == x.shape[2] * x.stride(2)

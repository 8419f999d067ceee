# SPDX-License-Identifier: Apache-2.0
"""Stages means and quantize: operands of the attend stage, and the block statistics.

Means and value scales are of the tokens as they come, the rest of their slots where there is an
order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import KEY_BLOCK, QUERY_BLOCK, block_count, count_keys
from ..kernels.spec import Element
from ..order.grid import TokenOrder
from .arithmetic import ARITHMETIC, E4M3_MAX, INT8_MAX, Arithmetic
from .key_mean import mean_stride
from .quantized import Quantized, blocked, gather

# Scale of a row or block of zeros, and the least scale of any. Levels of zeros are 0 whatever the
# scale; a scale of 1 would make one level worth more than all real logits, and with it the rounding
# of a kernel's score offset.
ZERO_SCALE = 2.0**-80
# Least scale of a channel of values: its reciprocal is finite.
LEAST_CHANNEL_SCALE = 2.0**-126
# Means are sums of numbers times this, so that sums of large numbers do not overflow.
SUM_UNIT = 2.0**-24


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: TokenOrder | None = None,
    *,
    element: Element = Element.INT8_FP16,
    smooth_k: bool = True,
    key_lengths: Tensor | None = None,
    kbar: Tensor | None = None,
    vbar: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Quantized:
    """Quantizes q (B, H, Nq, D), k and v (B, Hkv, Nk, D) for `element`, in the first of `order`'s
    token orders or as they come; float32 inputs read as bf16.

    `kbar`, `vbar`, `v_scale` (B, Hkv, D) float32 replace the means and scales computed here: block
    statistics are not shift-invariant, so a kernel is judged on the means it took itself. In an
    order of many tokens the mean key is that of a sample (`mean_stride`).

    Raises:
        ValueError: key lengths cut into the grid of the order.
    """
    if order is not None:
        assert q.shape[2] == k.shape[2] == order.tokens
        _check(order, key_lengths)
        order = order.on(q.device)
    arithmetic = ARITHMETIC[element]
    q, k, v = (x.bfloat16() if x.dtype == torch.float32 else x for x in (q, k, v))
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    smooth_k = smooth_k and arithmetic.quantized_qk
    stride = mean_stride(k.shape[2], order is not None)
    if stride > 1 and kbar is None and smooth_k:
        kbar = sampled_mean(k, key_lengths, stride)
    if order is None:
        query_counts = count_rows(q.shape[2], q.device)
        key_counts = count_keys(k.shape[2], key_lengths, batch, k.device)
    else:
        query_counts, key_counts = order.query_counts(), order.key_counts(key_lengths, batch)

    def of_head(given: Tensor | None, b: int, h: int) -> Tensor | None:
        return None if given is None else given[b, h]

    keys = _by_head(
        lambda b, h: _quantize_keys(
            k[b, h], order, key_counts[b], arithmetic, smooth_k, of_head(kbar, b, h)
        ),
        batch,
        kv_heads,
    )
    values = _by_head(
        lambda b, h: _quantize_values(
            v[b, h], order, key_counts[b], arithmetic, of_head(vbar, b, h), of_head(v_scale, b, h)
        ),
        batch,
        kv_heads,
    )
    group = heads // kv_heads
    queries = _by_head(
        lambda b, h: _quantize_queries(
            q[b, h], order, query_counts, arithmetic, keys["kbar"][b, h // group]
        ),
        batch,
        heads,
    )
    finite = keys.pop("finite") & values.pop("finite")
    return Quantized(
        element=element,
        order=order,
        query_counts=query_counts,
        key_counts=key_counts,
        key_lengths=key_lengths,
        finite=finite,
        **queries,
        **keys,
        **values,
    )


def _quantize_queries(
    q: Tensor, order: TokenOrder | None, counts: Tensor, arithmetic: Arithmetic, kbar: Tensor
) -> dict[str, Tensor]:
    """Quantizes the queries of one head (tokens, D); counts (nq,) queries of each block."""
    rows = gather(q, order).float()
    slots = count_rows(rows.shape[0], q.device)
    mean, similarity = _block_statistics(blocked(rows, QUERY_BLOCK), slots)
    rows_a_query = slots.float() / counts  # empty slots are zeros, which counted
    levels, scale = stored(rows.unsqueeze(1), arithmetic)
    return {
        "q_levels": levels.squeeze(1),
        "q_scale": scale,
        "q_block_mean": mean * rows_a_query.unsqueeze(-1),
        "q_self_similarity": similarity * rows_a_query.square(),
        "q_dot_kbar": rows @ kbar,
    }


def _quantize_keys(
    k: Tensor,
    order: TokenOrder | None,
    counts: Tensor,
    arithmetic: Arithmetic,
    smooth: bool,
    kbar: Tensor | None,
) -> dict[str, Tensor]:
    """Quantizes the keys of one head (tokens, D); counts (nk,) valid keys of each block."""
    centred, kbar, finite = _centred(k, counts, smooth, kbar)
    rows = gather(centred, order)
    blocks = blocked(rows, KEY_BLOCK)
    mean, similarity = _block_statistics(blocks, counts)
    levels, scale = stored(blocks, arithmetic)
    return {
        "k_levels": levels.flatten(0, 1)[: rows.shape[0]],
        "k_scale": scale,
        "kbar": kbar,
        "k_block_mean": mean,
        "k_variance": _variance(blocks, mean, counts),
        "k_self_similarity": similarity,
        "finite": finite,
    }


def _quantize_values(
    v: Tensor,
    order: TokenOrder | None,
    counts: Tensor,
    arithmetic: Arithmetic,
    vbar: Tensor | None,
    v_scale: Tensor | None,
) -> dict[str, Tensor]:
    """Quantizes the values of one head (tokens, D)."""
    centred, vbar, finite = _centred(v, counts, arithmetic.quantized_qk, vbar)
    if v_scale is None:
        v_scale = torch.ones_like(vbar)
        if arithmetic.quantized_qk:
            largest = pad(centred, (0, 0, 0, 1)).abs().amax(0)  # a zero row: there may be no keys
            scale = (largest / E4M3_MAX).clamp(min=LEAST_CHANNEL_SCALE)
            v_scale = torch.where(largest > 0, scale, 1.0)
    rows = gather(centred, order)
    blocks = blocked(rows, KEY_BLOCK)
    mean = blocks.sum(1) / counts.clamp(min=1).unsqueeze(-1)
    if arithmetic.integer_pv:
        levels, block_scale = stored(blocks / v_scale, arithmetic)
        levels = levels.flatten(0, 1)[: rows.shape[0]]
    else:
        levels, block_scale = arithmetic.round(rows / v_scale), torch.ones_like(blocks[:, 0, 0])
    return {
        "v_levels": levels,
        "v_scale": v_scale,
        "v_block_scale": block_scale,
        "vbar": vbar,
        "v_block_mean": mean,
        "v_variance": _variance(blocks, mean, counts).sum(-1),
        "finite": finite,
    }


def _centred(
    rows: Tensor, counts: Tensor, around_mean: bool, mean: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (tokens, D) less their mean, or the given one: float32, 0 for those that are not valid.
    Also the mean (D,), which is 0 unless `around_mean`, and whether all valid rows are finite."""
    length = counts.sum()
    valid = (torch.arange(rows.shape[0], device=rows.device) < length).unsqueeze(-1)
    rows = torch.where(valid, rows, 0).float()
    if mean is None:
        mean = rows.new_zeros(rows.shape[1])
        if around_mean:
            mean = (rows * SUM_UNIT).sum(0) / length.clamp(min=1) / SUM_UNIT
    return torch.where(valid, rows - mean, 0), mean, rows.isfinite().all()


def stored(groups: Tensor, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Levels (n, rows, D) of `groups`, and the scale (n,) that the rows of each share: NaN where
    they are not finite. INT8 levels are -127..127, and 0 where the scale is NaN."""
    if not arithmetic.quantized_qk:
        return arithmetic.round(groups), torch.ones_like(groups[:, 0, 0])
    largest = groups.abs().amax((-2, -1))
    counts = largest > ZERO_SCALE * INT8_MAX  # more than zeros
    scale = torch.where(counts, largest / INT8_MAX, ZERO_SCALE)
    # Multiplying by 127 / largest settles exact halves: bf16 is full of them. A true division:
    # Python's `127 / tensor` multiplies by a rounded reciprocal.
    inverse = torch.full_like(largest, INT8_MAX).div(largest)
    levels = (groups * torch.where(counts, inverse, 1.0)[:, None, None]).round()
    levels = levels.nan_to_num(0, 0, 0).to(torch.int8)
    return levels, torch.where(largest.isfinite(), scale, torch.nan)


def sampled_mean(k: Tensor, key_lengths: Tensor | None, stride: int) -> Tensor:
    """(B, Hkv, D) float32: mean of k (B, Hkv, N, D), as 16-bit values; stride as `mean_stride`."""
    keys = k.bfloat16() if k.dtype == torch.float32 else k
    token = torch.arange(k.shape[2], device=k.device)
    counts = (token // KEY_BLOCK % stride == 0).expand(k.shape[0], -1)
    if key_lengths is not None:
        counts = counts & (token < key_lengths.to(k.device).unsqueeze(-1))
    counted = counts.sum(-1).clamp(min=1)[:, None, None]
    kept = torch.where(counts[:, None, :, None], keys.double(), 0)
    return (kept.sum(2) / counted).float()


def count_rows(n_queries: int, device: torch.device) -> Tensor:
    """(nq,): number of rows of each query block."""
    starts = torch.arange(block_count(n_queries, QUERY_BLOCK), device=device) * QUERY_BLOCK
    return (n_queries - starts).clamp(max=QUERY_BLOCK)


def _block_statistics(blocks: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (n, D) and self-similarity (n,) over the valid rows of blocks (n, size, D), zero-padded.

    Self-similarity is |sum of unit rows|^2 / rows^2: 1 when all rows point one way, 0 when they
    cancel. A zero row has no direction and adds nothing. Rows that are not finite make it NaN.
    """
    rows = counts.clamp(min=1).float().unsqueeze(-1)
    length = blocks.norm(dim=-1, keepdim=True)
    unit = torch.where(length == 0, 0, blocks / length)
    return blocks.sum(1) / rows, (unit.sum(1) / rows).square().sum(-1)


def _variance(blocks: Tensor, mean: Tensor, counts: Tensor) -> Tensor:
    """(n, D): variance of the valid rows of blocks (n, size, D), which come first, around mean."""
    inside = torch.arange(blocks.shape[1], device=blocks.device) < counts.unsqueeze(-1)
    deviation = (blocks - mean.unsqueeze(1)).masked_fill(~inside.unsqueeze(-1), 0)
    return deviation.square().sum(1) / counts.clamp(min=1).unsqueeze(-1)


def _by_head(stage, batch: int, heads: int) -> dict[str, Tensor]:
    """Run `stage(b, h)` for each head, which bounds the temporaries, and stack its results."""
    results = [stage(b, h) for b in range(batch) for h in range(heads)]
    return {
        name: torch.stack([result[name] for result in results]).unflatten(0, (batch, heads))
        for name in results[0]
    }


def _check(order: TokenOrder, key_lengths: Tensor | None) -> None:
    if key_lengths is None:
        return
    last = order.segments[-1]
    least = last.first_token if last.queries_exact and len(order.segments) > 1 else order.tokens
    if int(key_lengths.min()) < least:
        raise ValueError(
            f"key_lengths go down to {int(key_lengths.min())}; they may cut the tokens after the "
            f"grid only, so give at least {least}."
        )

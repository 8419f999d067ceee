# SPDX-License-Identifier: Apache-2.0
"""Stages means and quantize: operands of the attend stage, and the block statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import KEY_BLOCK, QUERY_BLOCK, block_count, count_keys
from ..kernels.spec import Element
from .arithmetic import ARITHMETIC, E4M3_MAX, Arithmetic

INT8_MAX = 127.0
LOG2_E = math.log2(math.e)
# Scale of a row or block of zeros, and the least scale of any. Levels of zeros are 0 whatever the
# scale; a scale of 1 would make one level worth more than all real logits, and with it the rounding
# of a kernel's score offset.
ZERO_SCALE = 2.0**-80
# Means are sums of numbers times this, so that sums of large numbers do not overflow.
SUM_UNIT = 2.0**-24


@dataclass(frozen=True, eq=False)
class Quantized:
    """Q, K, V as the attend stage reads them. nq = ceil(Nq / 128), nk = ceil(Nk / 64).

    Levels times scale give the stored value: Q as it is, K around kbar, V around vbar. Without
    quantization the levels are bf16 or fp16 values, all scales are 1 and both means are 0.
    Rows at or beyond a batch entry's key length are zero. Everything else is float32.
    """

    element: Element
    q_levels: Tensor  # (B, H, Nq, D) int8, or bf16 / fp16
    k_levels: Tensor  # (B, Hkv, Nk, D) int8, or bf16 / fp16
    v_levels: Tensor  # (B, Hkv, Nk, D) fp16, e4m3 or bf16
    q_scale: Tensor  # (B, H, Nq)
    k_scale: Tensor  # (B, Hkv, nk)
    v_scale: Tensor  # (B, Hkv, D)
    kbar: Tensor  # (B, Hkv, D)
    vbar: Tensor  # (B, Hkv, D)
    q_block_mean: Tensor  # (B, H, nq, D)
    k_block_mean: Tensor  # (B, Hkv, nk, D), of K - kbar
    q_self_similarity: Tensor  # (B, H, nq)
    k_self_similarity: Tensor  # (B, Hkv, nk), of K - kbar
    q_dot_kbar: Tensor  # (B, H, Nq): what centring K took from each logit of the row, unscaled
    finite: Tensor  # (B, Hkv) bool: all keys and values are; else every row of the head is NaN
    key_counts: Tensor  # (B, nk) int32
    key_lengths: Tensor | None  # (B,) int32

    @property
    def batch(self) -> int:
        return self.q_levels.shape[0]

    @property
    def heads(self) -> int:
        return self.q_levels.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k_levels.shape[1]

    @property
    def n_queries(self) -> int:
        return self.q_levels.shape[2]

    @property
    def n_keys(self) -> int:
        return self.k_levels.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q_levels.shape[3]

    def row_factors(self, b: int, h: int, rows: slice, scale: float) -> Tensor:
        """(rows,) factors of query head h: levels of Q and K times it and the K scale are logits,
        in log2 units."""
        factors = self.q_scale[b, h, rows] * (scale * LOG2_E)
        finite = self.finite[b, h * self.kv_heads // self.heads]
        return torch.where(finite, factors, torch.nan)


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    element: Element = Element.INT8_FP16,
    smooth_k: bool = True,
    key_lengths: Tensor | None = None,
    kbar: Tensor | None = None,
    vbar: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Quantized:
    """Quantize q (B, H, Nq, D), k and v (B, Hkv, Nk, D) for `element`; float32 inputs read as bf16.

    `kbar`, `vbar`, `v_scale` (B, Hkv, D) float32 replace the means and scales computed here: block
    statistics are not shift-invariant, so a kernel is judged on the means it took itself.
    """
    arithmetic = ARITHMETIC[element]
    q, k, v = (x.bfloat16() if x.dtype == torch.float32 else x for x in (q, k, v))
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    key_counts = count_keys(k.shape[2], key_lengths, batch, k.device)
    smooth_k = smooth_k and arithmetic.quantized_qk

    keys = _by_head(
        lambda b, h: _quantize_keys(
            k[b, h], key_counts[b], arithmetic, smooth_k, None if kbar is None else kbar[b, h]
        ),
        batch,
        kv_heads,
    )
    values = _by_head(
        lambda b, h: _quantize_values(
            v[b, h],
            key_counts[b],
            arithmetic,
            None if vbar is None else vbar[b, h],
            None if v_scale is None else v_scale[b, h],
        ),
        batch,
        kv_heads,
    )
    group = heads // kv_heads
    queries = _by_head(
        lambda b, h: _quantize_queries(q[b, h], arithmetic, keys["kbar"][b, h // group]),
        batch,
        heads,
    )
    finite = keys.pop("finite") & values.pop("finite")
    return Quantized(
        element=element,
        key_counts=key_counts,
        key_lengths=key_lengths,
        finite=finite,
        **queries,
        **keys,
        **values,
    )


def _quantize_queries(q: Tensor, arithmetic: Arithmetic, kbar: Tensor) -> dict[str, Tensor]:
    """Quantizes the queries of one head (Nq, D)."""
    rows = q.float()
    counts = count_rows(q.shape[0], q.device)
    mean, similarity = _block_statistics(_blocked(rows, QUERY_BLOCK), counts)
    if arithmetic.quantized_qk:
        largest = rows.abs().amax(-1)
        scale = int8_scale(largest)
        levels = int8_levels(rows, largest.unsqueeze(-1))
    else:
        scale = torch.ones(q.shape[0], dtype=torch.float32, device=q.device)
        levels = arithmetic.round(rows)
    return {
        "q_levels": levels,
        "q_scale": scale,
        "q_block_mean": mean,
        "q_self_similarity": similarity,
        "q_dot_kbar": rows @ kbar,
    }


def _quantize_keys(
    k: Tensor, counts: Tensor, arithmetic: Arithmetic, smooth: bool, kbar: Tensor | None
) -> dict[str, Tensor]:
    """Quantizes the keys of one head (Nk, D); counts (nk,) valid keys of each block."""
    valid = _valid_rows(counts, k.shape[0])
    rows = torch.where(valid, k, 0).float()
    if kbar is None:
        kbar = _mean(rows, counts) if smooth else rows.new_zeros(rows.shape[1])
    centred = torch.where(valid, rows - kbar, 0)
    blocks = _blocked(centred, KEY_BLOCK)
    mean, similarity = _block_statistics(blocks, counts)
    if arithmetic.quantized_qk:
        largest = blocks.abs().amax((-2, -1))
        scale = int8_scale(largest)
        levels = int8_levels(blocks, largest[:, None, None]).flatten(0, 1)[: k.shape[0]]
    else:
        scale = torch.ones(counts.shape[0], dtype=torch.float32, device=k.device)
        levels = arithmetic.round(centred)
    return {
        "k_levels": levels,
        "k_scale": scale,
        "kbar": kbar,
        "k_block_mean": mean,
        "k_self_similarity": similarity,
        "finite": rows.isfinite().all(),
    }


def _quantize_values(
    v: Tensor,
    counts: Tensor,
    arithmetic: Arithmetic,
    vbar: Tensor | None,
    v_scale: Tensor | None,
) -> dict[str, Tensor]:
    """Quantizes the values of one head (Nk, D)."""
    valid = _valid_rows(counts, v.shape[0])
    rows = torch.where(valid, v, 0).float()
    plain = not arithmetic.quantized_qk
    if vbar is None:
        vbar = rows.new_zeros(rows.shape[1]) if plain else _mean(rows, counts)
    centred = torch.where(valid, rows - vbar, 0)
    if v_scale is None:
        largest = pad(centred, (0, 0, 0, 1)).abs().amax(0)  # one zero row: there may be no keys
        v_scale = torch.ones_like(vbar) if plain else _scale(largest, E4M3_MAX)
    return {
        "v_levels": arithmetic.round(centred / v_scale),
        "v_scale": v_scale,
        "vbar": vbar,
        "finite": rows.isfinite().all(),
    }


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


def _mean(rows: Tensor, counts: Tensor) -> Tensor:
    """Mean over the valid rows, the others being zero."""
    return (rows * SUM_UNIT).sum(0) / counts.sum().clamp(min=1) / SUM_UNIT


def _scale(largest: Tensor, levels: float) -> Tensor:
    return torch.where(largest > 0, largest / levels, 1.0)


def int8_scale(largest: Tensor) -> Tensor:
    """Scale of rows or blocks with these largest magnitudes; NaN where they are not finite."""
    scale = torch.where(_counts(largest), largest / INT8_MAX, ZERO_SCALE)
    return torch.where(largest.isfinite(), scale, torch.nan)


def _counts(largest: Tensor) -> Tensor:
    """Whether rows or blocks with these largest magnitudes are more than zeros."""
    return largest > ZERO_SCALE * INT8_MAX


def int8_levels(values: Tensor, largest: Tensor) -> Tensor:
    """Levels -127..127, 0 where the scale says NaN. Multiplying by 127 / largest settles exact
    halves: bf16 is full of them."""
    # A true division: Python's `127 / tensor` multiplies by a rounded reciprocal.
    inverse = torch.full_like(largest, INT8_MAX).div(largest)
    levels = (values * torch.where(_counts(largest), inverse, 1.0)).round()
    return levels.nan_to_num(0, 0, 0).to(torch.int8)


def _valid_rows(counts: Tensor, rows: int) -> Tensor:
    return (torch.arange(rows, device=counts.device) < counts.sum()).unsqueeze(-1)


def _blocked(rows: Tensor, size: int) -> Tensor:
    """(N, D) to (ceil(N / size), size, D), zero-padded."""
    blocks = block_count(rows.shape[0], size)
    return pad(rows, (0, 0, 0, blocks * size - rows.shape[0])).unflatten(0, (blocks, size))


def _by_head(stage, batch: int, heads: int) -> dict[str, Tensor]:
    """Run `stage(b, h)` for each head, which bounds the temporaries, and stack its results."""
    results = [stage(b, h) for b in range(batch) for h in range(heads)]
    return {
        name: torch.stack([result[name] for result in results]).unflatten(0, (batch, heads))
        for name in results[0]
    }

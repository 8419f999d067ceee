# SPDX-License-Identifier: Apache-2.0
"""Ranking of key blocks: by their share of the attention, or by the error of pooling them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK
from .operands import Operands, by_query_head

LEAST_ERROR = 1e-30  # squared; keeps the logarithm of an error of 0 a number, below all others


def block_scores(x: Operands, scale: float) -> Tensor:
    """(B, H, nq, nk): the pooled logit, mean query . mean centred key * scale."""
    return x.q_block_mean @ by_query_head(x.k_block_mean, x.q_block_mean.shape[1]).mT * scale


def log_mass(x: Operands, scale: float) -> Tensor:
    """(B, H, nq, nk): natural log of a block's mass, up to a constant a row: the pooled logit, plus
    ln(n / 64) for the n keys of the block (nothing for a full one); -inf for an empty block."""
    fill = x.key_counts.float() / KEY_BLOCK
    return block_scores(x, scale) + fill.log()[:, None, None]


def log_scores(x: Operands, scale: float, valid: Tensor) -> tuple[Tensor, Tensor]:
    """`log_mass`, and the natural log of the error that pooling a block makes, both (B, H, nq, nk)
    and up to a constant a row.

    With logits of variance s in a block, its true mass is exp(s / 2) times that of its mean key.
    The mean key misses about s / 2 of it, which pulls the output by mean(V_j) - o, and the pairing
    of scores with values, which cancels over 64 keys as independent terms do:

        mass * exp(s / 2) * sqrt((s / 2)^2 |mean(V_j) - o|^2 + s / 64 * tr Var(V_j)),
        s = sum_c qbar_c^2 Var(K_j)_c scale^2,   o = sum_j mass_j mean(V_j) over the valid blocks

    Other forms leave more error (docs/experiments.md, Ranking by error).
    """
    any_block = log_mass(x, scale)
    by_mass = any_block.masked_fill(~valid, -torch.inf)
    values, key_variance = (
        by_query_head(of_keys, by_mass.shape[1]) for of_keys in (x.v_block_mean, x.k_variance)
    )
    mass = by_mass.softmax(-1).nan_to_num(0.0)  # a row without valid blocks has no softmax
    output = mass @ values
    distance = (
        output.square().sum(-1, keepdim=True)
        - 2 * output @ values.transpose(-1, -2)
        + values.square().sum(-1).unsqueeze(-2)
    ).clamp(min=0)
    variance = x.q_block_mean.square() @ key_variance.transpose(-1, -2) * scale**2
    scatter = by_query_head(x.v_variance, by_mass.shape[1]).unsqueeze(-2)
    squared = (variance / 2).square() * distance + variance / KEY_BLOCK * scatter
    return any_block, by_mass + variance / 2 + squared.clamp(min=LEAST_ERROR).log() / 2

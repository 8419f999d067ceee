# SPDX-License-Identifier: Apache-2.0
"""Ranking of key blocks: by their share of the attention, or by the error of pooling them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK

LEAST_ERROR = 1e-30  # squared; keeps the logarithm of an error of 0 a number, below all others


@dataclass(frozen=True, eq=False)
class BlockFacts:
    """Statistics of blocks, float32; keys and values around the means of their head.

    q_block_mean (B, H, nq, D); k_block_mean, k_variance, v_block_mean (B, Hkv, nk, D); v_variance
    (B, Hkv, nk), summed over channels; key_counts (B, nk).
    """

    q_block_mean: Tensor
    k_block_mean: Tensor
    key_counts: Tensor
    k_variance: Tensor
    v_block_mean: Tensor
    v_variance: Tensor

    def of_query_heads(self, of_keys: Tensor) -> Tensor:
        """Repeats (B, Hkv, ...) to (B, H, ...)."""
        group = self.q_block_mean.shape[1] // of_keys.shape[1]
        return of_keys if group == 1 else of_keys.repeat_interleave(group, 1)


def log_mass(facts: BlockFacts, scale: float) -> Tensor:
    """(B, H, nq, nk): natural log of a block's mass, up to a constant a row: the pooled logit, plus
    ln(n / 64) for the n keys of the block (nothing for a full one); -inf for an empty block."""
    key_means = facts.of_query_heads(facts.k_block_mean)
    fill = facts.key_counts.float() / KEY_BLOCK
    return facts.q_block_mean @ key_means.transpose(-1, -2) * scale + fill.log()[:, None, None]


def log_scores(facts: BlockFacts, scale: float, valid: Tensor) -> tuple[Tensor, Tensor]:
    """`log_mass`, and the natural log of the error that pooling a block makes, both (B, H, nq, nk)
    and up to a constant a row.

    With logits of variance s in a block, its true mass is exp(s / 2) times that of its mean key.
    The mean key misses about s / 2 of it, which pulls the output by mean(V_j) - o, and the pairing
    of scores with values, which cancels over 64 keys as independent terms do:

        mass * exp(s / 2) * sqrt((s / 2)^2 |mean(V_j) - o|^2 + s / 64 * tr Var(V_j)),
        s = sum_c qbar_c^2 Var(K_j)_c scale^2,   o = sum_j mass_j mean(V_j) over the valid blocks

    Other forms leave more error (docs/experiments.md, Ranking by error).
    """
    any_block = log_mass(facts, scale)
    by_mass = any_block.masked_fill(~valid, -torch.inf)
    mass = by_mass.softmax(-1).nan_to_num(0.0)  # a row without valid blocks has no softmax
    values = facts.of_query_heads(facts.v_block_mean)
    output = mass @ values
    distance = (
        output.square().sum(-1, keepdim=True)
        - 2 * output @ values.transpose(-1, -2)
        + values.square().sum(-1).unsqueeze(-2)
    ).clamp(min=0)
    key_variance = facts.of_query_heads(facts.k_variance)
    variance = facts.q_block_mean.square() @ key_variance.transpose(-1, -2) * scale**2
    scatter = facts.of_query_heads(facts.v_variance).unsqueeze(-2)
    squared = (variance / 2).square() * distance + variance / KEY_BLOCK * scatter
    return any_block, by_mass + variance / 2 + squared.clamp(min=LEAST_ERROR).log() / 2

# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a language model on a text, with every layer attending in one of the modes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.quality.modes import ELEMENT, Mode, attend, reached_density
from benchmarks.quality_data.smollm import Attention, SmolLM
from sparge.head_settings import HeadBudget
from sparge.reference.packed import pack_qkv


def perplexity(
    model: SmolLM, tokens: Tensor, mode: Mode, budgets: Sequence[HeadBudget]
) -> tuple[float, float]:
    """exp of the mean surprise at tokens (N,), and the density reached; one budget a layer."""
    densities: list[Tensor] = []
    found = model.perplexity(tokens, attention_of(mode, budgets, densities))
    return found, float(torch.stack(densities).mean())


def attention_of(mode: Mode, budgets: Sequence[HeadBudget], densities: list[Tensor]) -> Attention:
    """Attention in a mode, which adds the density of each head (heads,) to `densities`, layer by
    layer."""

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = pack_qkv(q, k, v, element=ELEMENT)
        out, choice = attend(mode, packed, budgets[layer], is_causal=True)
        densities.append(reached_density(choice))
        return out

    return attention

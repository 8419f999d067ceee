# SPDX-License-Identifier: Apache-2.0
"""Two transformers with attention as CogVideoX and Flux have it, small enough for a CPU.

Attention runs in a processor, and tuned attention is hung into it from outside, as upstream's
evaluation does with diffusers' models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, HEADS = 64, 2
TEXT, GRID = 40, 7 * 64


class Attention(nn.Module):
    """Projections; the processor does the rest. Queries look for tokens like themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        for layer in (self.to_q, self.to_v, self.to_out):
            nn.init.orthogonal_(layer.weight)
        with torch.no_grad():
            self.to_k.weight.copy_(self.to_q.weight)
        self.processor: Callable[..., Tensor] = dense_processor

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            layer(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(self.processor(self, q, k, v).transpose(1, 2).flatten(2))


def dense_processor(attn: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def tuned_processor(attn: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attn.inner_attention(q, k, v, is_causal=False)


class Block(nn.Module):
    """Flux's single block; as a double block, text has a norm of its own, both attend together."""

    def __init__(self, name: str, norms: int = 1) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(norms))
        self.add_module(name, Attention())
        self.attention = [getattr(self, name)]  # no second name

    def forward(self, hidden: Tensor) -> Tensor:
        text, grid = hidden[:, :TEXT], hidden[:, TEXT:]
        normed = torch.cat([self.norms[0](text), self.norms[-1](grid)], 1)
        return hidden + 0.2 * self.attention[0](normed)


class CogVideoX(nn.Module):
    """Text and video tokens in one sequence, one set of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(Block("attn1") for _ in range(2))

    def forward(self, text: Tensor, grid: Tensor) -> Tensor:
        hidden = torch.cat([text, grid], 1)
        for block in self.transformer_blocks:
            hidden = block(hidden)
        return hidden[:, TEXT:]


class Flux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([Block("attn", norms=2)])
        self.single_transformer_blocks = nn.ModuleList([Block("attn")])

    def forward(self, text: Tensor, grid: Tensor) -> Tensor:
        hidden = torch.cat([text, grid], 1)
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            hidden = block(hidden)
        return hidden[:, TEXT:]


def attention_layers(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def steps(generator: torch.Generator, count: int) -> list[tuple[Tensor, Tensor]]:
    """Text and grid tokens of some sampling steps: seven kinds of token, less noise each step."""
    kinds = torch.randn(1, 7, 1, WIDTH, generator=generator)
    text = torch.randn(1, TEXT, WIDTH, generator=generator)

    def at(noise: float) -> tuple[Tensor, Tensor]:
        grid = kinds + noise * torch.randn(1, 7, GRID // 7, WIDTH, generator=generator)
        return text.bfloat16(), grid.flatten(1, 2).bfloat16()

    return [at(0.4 - 0.2 * step / count) for step in range(count)]

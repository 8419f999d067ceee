# SPDX-License-Identifier: Apache-2.0
"""PyTorch's attention with rounded operands, or with noise: what errors look like in a model.

Nothing of `sparge` computes here, so masks, causal calls and grouped heads mean what they mean to
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

from sparge.checks.torch_call import TorchCall
from sparge.common.torch_attention import TORCH_ATTENTION

#: Tokens that share a scale, as key blocks do.
BLOCK = 64
LEVELS = 127
NOISE = 0.1

Serve = Callable[[TorchCall], Tensor]


@contextmanager
def torchs_function_is(call: Callable[..., Tensor]) -> Iterator[None]:
    """Context in which models find `call` where they look for PyTorch's attention."""
    functional.scaled_dot_product_attention = call
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = TORCH_ATTENTION


@dataclass
class Served:
    """Number of the calls that came."""

    calls: int = 0


@contextmanager
def served_by(serve: Serve, least: int) -> Iterator[Served]:
    """Context in which `serve` computes calls of at least so many queries and keys."""
    served = Served()

    def call(*args: Any, **kwargs: Any) -> Tensor:
        given = TorchCall(*args, **kwargs)
        served.calls += 1
        is_long = min(given.query.shape[-2], given.key.shape[-2]) >= least
        return serve(given) if is_long else exact(given)

    with torchs_function_is(call):
        yield served


def exact(call: TorchCall) -> Tensor:
    return TORCH_ATTENTION(**call._asdict())


def rounded(call: TorchCall) -> Tensor:
    """Attention whose queries and keys have 8 bits, and whose values have 16: those of bfloat16
    where the model computes in float32."""
    mean = call.key.float().mean(-2, keepdim=True)  # softmax does not see it
    mask, value = call.attn_mask, call.value
    if mask is not None and mask.is_floating_point():
        mask = mask.float()
    if value.dtype == torch.float32:
        value = value.bfloat16()
    out = TORCH_ATTENTION(
        eight_bits(call.query),
        eight_bits(call.key.float() - mean),
        value.half().float(),
        mask,
        call.dropout_p,
        call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )
    return out.to(call.query.dtype)


def noisy(call: TorchCall) -> Tensor:
    """Exact attention with a tenth of noise on each number."""
    out = exact(call)
    return out + NOISE * out * torch.randn_like(out)


def eight_bits(x: Tensor) -> Tensor:
    """(..., tokens, channels) float32 of LEVELS on either side of 0, a scale for each BLOCK."""
    x, tokens = x.bfloat16().float(), x.shape[-2]
    blocks = pad(x, (0, 0, 0, -tokens % BLOCK)).unflatten(-2, (-1, BLOCK))
    scale = blocks.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30) / LEVELS
    return ((blocks / scale).round() * scale).flatten(-3, -2)[..., :tokens, :]

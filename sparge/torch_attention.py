# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own attention, wherever something of ours stands in its place, and why only it serves a
call.

This module is imported with the library, so a name in `torch.nn.functional` that is replaced later
changes nothing here. Reasons are those that `sparge.attention` does not give itself: it would take
some of these calls in another meaning.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .compiling import constant_in_graphs, transform_level
from .errors import KernelBuildError
from .kernels import DriverError, capabilities
from .kernels.warmup import why_no_kernel
from .order.grid import TokenGrid
from .reasons import Reason

#: Function that `torch.nn.functional` had when the library was imported.
TORCH_ATTENTION = scaled_dot_product_attention


def exact_attention(*arguments: Any, **named: Any) -> Tensor:
    """Result of `scaled_dot_product_attention`, also inside `sparge.sdpa`, which would catch the
    call of a model."""
    with torch._C.DisableTorchFunction():
        return TORCH_ATTENTION(*arguments, **named)


class TorchCall(NamedTuple):
    """Arguments of `scaled_dot_product_attention`, and what is known of the model that calls it."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    layer: int | None = None
    """Number of the layer in its model."""
    grid: TokenGrid | None = None
    """Grid of the sequence."""

    def exact(self) -> Tensor:
        """Result of torch's own attention."""
        return TORCH_ATTENTION(*self[:6], scale=self.scale, enable_gqa=self.enable_gqa)


#: Errors of kernels that cannot be had; the model can do without.
NO_KERNEL = (KernelBuildError, DriverError)
#: Why there are none on a device: another try takes seconds, and a call has many kernels.
_given_up: dict[torch.device, Reason] = {}

_PLAIN = (Tensor, torch.nn.Parameter)
NOT_BY_HEAD = "q, k and v are not (batch, heads, tokens, head_dim)"


def why_exact(call: TorchCall, min_tokens: int) -> str:
    """Reason why a call is not for sparse attention; empty where nothing speaks against it."""
    query, key, _, attn_mask, dropout_p, is_causal, *_ = call
    qkv = call[:3]
    given = qkv if attn_mask is None else (*qkv, attn_mask)
    if any(type(x) not in _PLAIN or x.is_nested for x in given):
        return "tensors of a class of their own, or nested ones"
    if any(x.dim() != 4 for x in qkv):
        return NOT_BY_HEAD
    if query.shape[2] < min_tokens or key.shape[2] < min_tokens:
        return f"fewer than {min_tokens} queries or keys (min_tokens)"
    if dropout_p != 0.0:
        return "dropout"
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return "gradients are wanted: sparse attention has no backward pass, so use torch.no_grad()"
    if query.shape[1] != key.shape[1] and not call.enable_gqa:
        return "fewer heads of keys without enable_gqa"
    read_as = _dtype(query)
    if any(_dtype(x) != read_as or x.device != query.device for x in qkv):
        return "q, k and v of different dtypes or devices"
    if attn_mask is not None and (why := _why_mask_is_torchs(query, key, attn_mask, is_causal)):
        return why
    return _why_machine_cannot(query.device)


def as_autocast(x: Tensor) -> Tensor:
    """Tensor as torch's own attention reads it under autocast."""
    return x.to(_dtype(x))


def _dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype  # torch knows no autocast of meta, and raises
    return torch.get_autocast_dtype(kind)


def _why_mask_is_torchs(query: Tensor, key: Tensor, mask: Tensor, is_causal: bool) -> str:
    if is_causal:
        return "a mask and is_causal"
    if torch.compiler.is_compiling():
        return "a mask in a graph of torch.compile, where nobody can read what it hides"
    added = mask.is_floating_point() and _dtype(mask) in (torch.float32, _dtype(query))
    if mask.dtype != torch.bool and not added:
        return "a mask that is neither bool, float32 nor of q's dtype"
    sizes = (*query.shape[:3], key.shape[2])[4 - mask.dim() :]
    fits = 2 <= mask.dim() <= 4 and mask.shape[-1] == key.shape[2]
    if not fits or any(x not in (1, size) for x, size in zip(mask.shape, sizes, strict=True)):
        return "a mask of another shape than (batch, heads, queries, keys)"
    return ""


def _why_machine_cannot(device: torch.device) -> str:
    """The CPU runs the reference, for whoever tries things out; another device without kernels has
    something better."""
    if not torch.compiler.is_compiling():
        if transform_level() is not None:
            return "torch.func or torch.vmap transforms the call"
        if device in _given_up:
            return _given_up[device]
    return "" if device.type == "cpu" else _why_no_kernels(device)


@constant_in_graphs
def _why_no_kernels(device: torch.device) -> str:
    return str(capabilities(device).reason)


def give_up(device: torch.device, error: KernelBuildError | DriverError) -> Reason:
    """Reason why calls on a device are exact from now on; the log says what is wrong."""
    return _given_up.setdefault(device, why_no_kernel(error))

# SPDX-License-Identifier: Apache-2.0
"""Peers: other attention kernels, each behind one function; an absent one says why."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
SMALL_TOKENS = 512


@dataclass(frozen=True)
class Peer:
    """One attention kernel. q, k, v and the result are (B, H, N, D) views of NHD memory, as models
    hold them."""

    name: str
    run: Attention


@dataclass(frozen=True)
class Absent:
    """Peer that cannot be timed here: nothing is skipped in silence."""

    name: str
    reason: str


def peers(density: float, head_dim: int) -> list[Peer | Absent]:
    """Peers that compute attention of that density."""
    if density < 1:
        return [_sol_attn(density, head_dim)]
    return [
        Peer("torch cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION)),
        Peer("torch flash", _sdpa(SDPBackend.FLASH_ATTENTION)),
        _int8_attention(),
        _flash_attention_4(),
    ]


def working(peer: Peer | Absent, head_dim: int) -> Peer | Absent:
    """Returns the peer when it computes a small call, else why not."""
    if isinstance(peer, Absent):
        return peer
    size = (1, SMALL_TOKENS, 2, head_dim)
    q = torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    try:
        peer.run(q, q, q)
        torch.cuda.synchronize()
    except Exception as error:  # whatever a peer raises is its reason
        return Absent(peer.name, in_a_line(error))
    return peer


def in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _sdpa(backend: SDPBackend) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return run


def _int8_attention() -> Peer | Absent:
    name, kitchen = "comfy-kitchen int8_attention", _import("comfy_kitchen", "int8_attention")
    return Absent(name, kitchen) if isinstance(kitchen, str) else Peer(name, kitchen.int8_attention)


def _sol_attn(density: float, head_dim: int) -> Peer | Absent:
    name, kitchen = "comfy-kitchen sol_attn", _import("comfy_kitchen", "sol_attn")
    if isinstance(kitchen, str):
        return Absent(name, kitchen)
    if head_dim != 128:
        return Absent(name, "it takes head_dim 128 only")
    if not kitchen.sol_attn_is_available(torch.device("cuda")):
        # It would run an eager reference without a word.
        return Absent(name, "its CUDA kernels do not run on this GPU")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = kitchen.sol_attn(*(x.transpose(1, 2) for x in (q, k, v)), topk_ratio=density)
        return out.transpose(1, 2)

    return Peer(name, run)


def _flash_attention_4() -> Peer | Absent:
    name, flash = "flash-attn-4", _import("flash_attn.cute", "flash_attn_func")
    if isinstance(flash, str):
        return Absent(name, flash)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)))
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return Peer(name, run)


def _import(name: str, function: str) -> Any:
    """Imports a module with this function; returns it, or why not."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a package that is there may fail in any way
        return in_a_line(error)
    return module if hasattr(module, function) else f"this {name} is too old to have {function}"

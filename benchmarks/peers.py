# SPDX-License-Identifier: Apache-2.0
"""Other attention kernels, each behind one function; an absent one says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """q, k, v and the result are (B, H, N, D) views of NHD memory, as models hold them."""

    name: str
    density: float
    run: Attention


def dense_peers() -> list[Peer]:
    def sdpa(backend: SDPBackend) -> Attention:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        return run

    peers = [
        Peer("torch cudnn", 1.0, sdpa(SDPBackend.CUDNN_ATTENTION)),
        Peer("torch flash", 1.0, sdpa(SDPBackend.FLASH_ATTENTION)),
    ]
    kitchen = _import("comfy_kitchen")
    if kitchen is not None and hasattr(kitchen, "int8_attention"):
        peers.append(Peer("comfy-kitchen int8_attention", 1.0, kitchen.int8_attention))
    flash4 = _import("flash_attn.cute")
    if flash4 is not None:

        def run_flash4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = flash4.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)))
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        peers.append(Peer("flash-attn-4", 1.0, run_flash4))
    return peers


def sparse_peers(density: float, head_dim: int) -> list[Peer]:
    kitchen = _import("comfy_kitchen")
    if kitchen is None or not hasattr(kitchen, "sol_attn") or head_dim != 128:
        return []
    if not kitchen.sol_attn_is_available(torch.device("cuda")):
        return []  # it would run an eager reference without a word

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = kitchen.sol_attn(*(x.transpose(1, 2) for x in (q, k, v)), topk_ratio=density)
        return out.transpose(1, 2)

    return [Peer("comfy-kitchen sol_attn", density, run)]


def absent() -> list[str]:
    """The peers this Python lacks, for the log: nothing is skipped in silence."""
    wanted = {"comfy_kitchen": "comfy-kitchen", "flash_attn.cute": "flash-attn-4"}
    missing = [
        f"{name} is not importable" for module, name in wanted.items() if not _import(module)
    ]
    kitchen = _import("comfy_kitchen")
    if kitchen is not None and not hasattr(kitchen, "sol_attn"):
        missing.append("this comfy-kitchen has no sol_attn (0.2.33 and newer do)")
    return missing


def _import(name: str):
    import importlib

    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None


def available(peer: Peer, device: torch.device) -> str:
    """ "" when the peer computes a small call, else its error."""
    q = torch.randn(1, 512, 2, 128, device=device, dtype=torch.bfloat16).transpose(1, 2)
    try:
        peer.run(q, q, q)
        torch.cuda.synchronize()
    except Exception as error:  # whatever a peer raises is its reason
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""

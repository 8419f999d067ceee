# SPDX-License-Identifier: Apache-2.0
"""Quickest self-attention of torch for each shape of the training, measured on this GPU.

cuDNN's kernels are often well ahead on Hopper, yet some versions of torch try them last, and not
every shape has a plan there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.tiny_video_dit.model import HEAD_DIM, Attention, dense

CANDIDATES = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
REPEATS = 5


def fastest_attention(shapes: Iterable[tuple[int, int, int]]) -> Attention:
    """Attention that takes the quickest way for each (clips, heads, tokens). Needs a GPU.

    Other shapes get torch's own choice.
    """
    quickest = {shape: best for shape in shapes if (best := _quickest(shape))}

    def attention(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        backend = quickest.get((q.shape[0], q.shape[1], q.shape[2]))
        if backend is None:
            return dense(q, k, v, block)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v)

    return attention


def _quickest(shape: tuple[int, int, int]) -> SDPBackend | None:
    clips, heads, tokens = shape
    q, k, v = (
        torch.randn(clips, tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for _ in range(3)
    )
    seconds: dict[SDPBackend, float] = {}
    for backend in CANDIDATES:
        try:
            seconds[backend] = _timed(backend, q, k, v)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            print(f"attention {shape}: {backend.name} cannot ({str(error).splitlines()[0]})")
        else:
            print(f"attention {shape}: {backend.name} {1e3 * seconds[backend]:.2f} ms a call")
    return min(seconds, key=seconds.__getitem__, default=None)


def _timed(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Seconds of a forward and a backward. Raises RuntimeError where it cannot or is not finite."""
    with sdpa_kernel(backend):
        for repeat in range(REPEATS + 1):
            if repeat == 1:  # the first one loads and plans
                torch.cuda.synchronize()
                started = time.perf_counter()
            out = scaled_dot_product_attention(q, k, v)
            gradients = torch.autograd.grad(out, (q, k, v), out)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / REPEATS
    if not all(torch.isfinite(part).all() for part in (out, *gradients)):
        raise RuntimeError("its output is not finite")
    return seconds

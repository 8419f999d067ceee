# SPDX-License-Identifier: Apache-2.0
"""Self-test: a small 8-bit call on the user's GPU beside masked attention in float64 on the CPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..attention import attention
from ..blocks import KEY_BLOCK, QUERY_BLOCK, block_count
from ..errors import Unsupported
from ..kernels.spec import HEAD_DIMS
from .timing import Exact, are_kept, keep_none

#: Largest error of a right kernel, as `row_errors` has it. Rounding as the kernels do errs by up to
#: 0.25 with E4M3 values, which have the fewest bits, and by half of that with others. Faults of one
#: block, scale, fragment or row err by 0.5 and more (`tests/speed/test_self_test.py`).
MOST = 0.4
HEADS, KV_HEADS, TOKENS = 4, 2, 330  # the last block of queries and of keys is short
KEPT = 0.6  # of the blocks


class WrongKernels(Unsupported):
    """A kernel computes something else on this GPU than it should."""


def check_kernels(device: torch.device) -> None:
    """Raises WrongKernels where 8-bit calls are not right on this GPU. A process tests it once."""
    if wrong := _wrong(device):
        raise WrongKernels(wrong)


def check_once(device: torch.device, exact: Exact) -> None:
    """`check_kernels`, where nothing is kept that tells that they passed it on this GPU."""
    if device.type == "cuda" and not are_kept(device, exact):
        check_kernels(device)
        keep_none(device, exact)


@cache  # kernels of another target cannot replace those that have served a call
def _wrong(device: torch.device) -> str:
    """What is wrong with 8-bit calls; empty where nothing is."""
    for head_dim in HEAD_DIMS:
        if not (error := largest_error(head_dim, device)) <= MOST:
            return (
                "the kernels compute something else on this GPU than they should "
                f"(error {error:.2g} at head_dim {head_dim}): please report it."
            )
    return ""


def largest_error(head_dim: int, device: torch.device) -> float:
    """Largest of `row_errors` of an 8-bit call; NaN where its result is no number. Raises as
    `sparge.attention` does."""
    inputs = make_inputs(head_dim)
    q, k, v, kept = (x.to(device) for x in inputs)
    with torch.inference_mode():
        found = attention(q, k, v, block_mask=kept, output_dtype=torch.float32)
    return float(row_errors(found.cpu(), masked_attention(*inputs)).max())


def row_errors(found: Tensor, true: Tensor) -> Tensor:
    """(1, HEADS, TOKENS): largest error of an element of each row, in units of the row's root mean
    square. A mean over more would hide what is wrong in one tile, row or column alone."""
    return (found - true).abs().amax(-1) / true.square().mean(-1).sqrt()


def masked_attention(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """(1, HEADS, TOKENS, head_dim) float64: attention over the kept blocks."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    seen = kept.repeat_interleave(QUERY_BLOCK, 2).repeat_interleave(KEY_BLOCK, 3)
    logits = q.double() @ k.mT * q.shape[-1] ** -0.5
    return logits.masked_fill(~seen[..., :TOKENS, :TOKENS], -torch.inf).softmax(-1) @ v


def make_inputs(head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a block mask. What has a scale of its own differs in size from its neighbour:
    rows of queries, blocks of keys and of values, channels of values. Keys and values have a mean,
    which the kernels take off."""
    with torch.device("cpu"):  # whatever the caller's default is
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int, tokens: int = TOKENS) -> Tensor:
            shape = (1, heads, tokens, head_dim)
            return torch.randn(shape, generator=generator, dtype=torch.float32)

        token, channel = torch.arange(TOKENS)[:, None], torch.arange(head_dim)
        odd = token // KEY_BLOCK % 2
        q = normal(HEADS) * (1 + token % 2) / 2
        k = normal(KV_HEADS) * (1 + odd) + normal(KV_HEADS, 1)
        v = normal(KV_HEADS) * (1 + channel % 2) * (3 - 2 * odd) + normal(KV_HEADS, 1) / 2
        blocks = (1, HEADS, block_count(TOKENS, QUERY_BLOCK), block_count(TOKENS, KEY_BLOCK))
        kept = torch.rand(blocks, generator=generator, dtype=torch.float32) < KEPT
        kept[..., 0] = True
        return q.bfloat16(), k.bfloat16(), v.bfloat16(), kept

# SPDX-License-Identifier: Apache-2.0
"""Self-test: a small call on the user's GPU beside the emulation of its arithmetic on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..attention import attention
from ..blocks import KEY_BLOCK, QUERY_BLOCK, block_count
from ..common.metrics import rel_l2
from ..errors import Unsupported
from ..kernels.device import capabilities
from ..kernels.spec import HEAD_DIMS, Element, eight_bit_element
from ..policy import SparsePolicy
from ..stages.as_written import as_written

#: Largest relative L2 distance of a right kernel. On an H100 those of the GPU tests stay below
#: 1.3e-4; elements of 8 bits are 0.01 and more from each other.
MOST = 3e-3
HEADS, TOKENS = 2, 330  # the last block of queries and of keys is short
KEPT = 0.6  # of the blocks


class WrongKernels(Unsupported):
    """A kernel computes something else on this GPU than it should."""


def check_kernels(device: torch.device) -> None:
    """Raises WrongKernels where 8-bit calls are not right on this GPU."""
    for head_dim in HEAD_DIMS:
        if not (error := error_beside_emulation(head_dim, device)) <= MOST:
            raise WrongKernels(
                f"the kernels compute something else on this GPU than they should (relative error "
                f"{error:.2g} at head_dim {head_dim}): please report it."
            )


def error_beside_emulation(head_dim: int, device: torch.device) -> float:
    """Relative L2 distance of 8-bit kernels from what they should compute; NaN where their result
    is no number. Raises as `sparge.attention` does."""
    inputs = _inputs(head_dim)
    q, k, v, kept = (x.to(device) for x in inputs)
    with torch.inference_mode():
        found = attention(q, k, v, block_mask=kept, output_dtype=torch.float32)
    element = eight_bit_element(capabilities(device).arch)
    return rel_l2(found.cpu(), expected(element, *inputs))


def expected(element: Element, q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """Result by the emulation, (1, HEADS, TOKENS, head_dim) float32."""
    with torch.no_grad(), as_written(q.device):
        given = (q, k, v, SparsePolicy())
        attended, _ = reference.attention(*given, block_mask=kept, element=element)
    return attended.out


def _inputs(head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a block mask. Keys have a mean, and blocks of values differ in size: what a
    scale by block is for."""
    with torch.device("cpu"):  # whatever the caller's default is
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 1, HEADS, TOKENS, head_dim, generator=generator)
        k = k + torch.randn(1, HEADS, 1, head_dim, generator=generator)
        v = v * (1 + torch.arange(TOKENS) // KEY_BLOCK)[:, None]
        blocks = (1, HEADS, block_count(TOKENS, QUERY_BLOCK), block_count(TOKENS, KEY_BLOCK))
        kept = torch.rand(blocks, generator=generator) < KEPT
        kept[..., 0] = True
        return q.bfloat16(), k.bfloat16(), v.bfloat16(), kept

# SPDX-License-Identifier: Apache-2.0
"""Cross-attention stays exact; but where PyTorch serves it, by the faster one of its kernels.

ComfyUI asks PyTorch for flash attention first. On an H200 cuDNN's takes .59 instead of 1.04 ms for
the prompt of Wan (32,760 x 512 tokens, 40 heads), a fiftieth of a call whose self-attention is
sparse. Only in passes that may be sparse: the dense steps are ComfyUI's own.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..sparge.plan.worth import TORCH_KERNELS, faster_kernel, torch_kernel
from .attention_call import AttentionCall
from .worth import known_rates


def by_faster_kernel(call: AttentionCall) -> Tensor | None:
    """What a call without a mask gives, in its layout; None where no kernel of PyTorch's is known
    to be faster than the one that ComfyUI would have."""
    rates = known_rates(call)
    if rates is None or call.facts.unknown_options:
        return None
    q, k, v = call.heads_first()
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    faster = faster_kernel(pairs, rates, call.dense_kernel())
    if faster is None or torch_kernel(q, k, v, [TORCH_KERNELS[faster]]) != faster:
        return None
    with sdpa_kernel(TORCH_KERNELS[faster]):
        out = scaled_dot_product_attention(q, k, v, scale=call.scale)
    return out if call.skip_output_reshape else out.transpose(1, 2).flatten(2)

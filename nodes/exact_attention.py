# SPDX-License-Identifier: Apache-2.0
"""Exact attention by the faster one of PyTorch's kernels, where it is known which one that is.

ComfyUI asks PyTorch for flash attention first. Cross-attention takes the faster kernel in passes
that may be sparse, and self-attention in calls that are measured. All other dense calls are
ComfyUI's own (docs/experiments.md, Which kernel of PyTorch serves an exact call).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..sparge.speed.worth import TORCH_KERNELS, faster_kernel, torch_kernel
from ..sparge.tune.worth import known_rates
from .attention_call import AttentionCall, Dense


class ExactResult:
    """Result of exact attention in a call, computed once however often it is asked for."""

    def __init__(self, call: AttentionCall, own: Dense) -> None:
        """own: computes the call by whatever serves ComfyUI's dense calls."""
        self._call, self._compute_own = call, own
        self._out: Tensor | None = None
        self.by_faster = False
        """Whether a faster kernel gave it."""
        self.failure: Exception | None = None
        """Error that the dense path raised: not one of this pack."""

    def own(self) -> Tensor:
        if self._out is None:
            try:
                self._out = self._compute_own()
            except Exception as error:
                self.failure = error
                raise
        return self._out

    def fastest(self) -> Tensor:
        """Returns the result by a faster kernel, where one is known."""
        if self._out is None:
            self._out = by_faster_kernel(self._call)
            self.by_faster = self._out is not None
        return self.own()


def by_faster_kernel(call: AttentionCall) -> Tensor | None:
    """Result of a call without a mask, in its layout; None where no kernel of PyTorch's is known to
    be faster than the one that ComfyUI would have."""
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

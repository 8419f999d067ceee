# SPDX-License-Identifier: Apache-2.0
"""Blocks that a call keeps, by the library's own routing."""

from __future__ import annotations

from torch import Tensor

from sparge import SparsePolicy
from sparge.blocks import unpack
from sparge.call import make_call
from sparge.checks.validate import Alignment
from sparge.stages import on_reference
from sparge.stages.pipeline import has_kernels, quantize, route


def kept_blocks(
    q: Tensor,
    k: Tensor,
    policy: SparsePolicy,
    *,
    causal: Alignment | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """(B, H, query blocks, key blocks) bool: what `sparge.attention` keeps of q (B, H, Nq, D) and
    k (B, Hkv, Nk, D), whatever the values."""
    call = make_call(q, k, k, policy, "HND", False, None, key_lengths, None, causal=causal)
    assert not call.bottom_right, "such a call is made of two"
    if has_kernels(call):
        return unpack(route(call, quantize(call), None), call.shape.key_blocks)
    _, routed = on_reference.attend(call)
    return routed.kept

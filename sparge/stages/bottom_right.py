# SPDX-License-Identifier: Apache-2.0
"""Causal attention whose last query sees the last key, in parts that are causal from the top left.

With more keys than queries every query sees the first keys, and from there on the call is square:
a rectangle and a triangle, merged by their log-sum-exps. With fewer keys the first queries see
none, and the others are square.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK, QUERY_BLOCK
from ..call import CheckedCall
from ..policy import SparsePolicy
from .pipeline import run


def run_bottom_right(
    call: CheckedCall, out: Tensor, lse: Tensor | None, counters: Tensor | None
) -> None:
    """Runs `pipeline.run` on the parts of a call whose queries and keys differ in number."""
    if call.q.shape[2] > call.k.shape[2]:
        _run_last_queries(call, out, lse, counters)
    else:
        _run_merged(call, out, lse, counters)


def _run_last_queries(
    call: CheckedCall, out: Tensor, lse: Tensor | None, counters: Tensor | None
) -> None:
    first = call.q.shape[2] - call.k.shape[2]
    mask = call.block_mask
    square = replace(
        call,
        q=call.q[:, :, first:],
        block_mask=None if mask is None else mask[:, :, first // QUERY_BLOCK :],
        policy=_later(call, first),
        bottom_right=False,
    )
    out[:, :, :first] = 0
    if lse is None:
        run(square, out[:, :, first:], None, counters)
        return
    part = torch.empty(square.q.shape[:3], dtype=torch.float32, device=lse.device)
    run(square, out[:, :, first:], part, counters)
    lse[:, :, :first] = -torch.inf
    lse[:, :, first:] = part


def _run_merged(
    call: CheckedCall, out: Tensor, lse: Tensor | None, counters: Tensor | None
) -> None:
    outs, sums = [], []
    for part in (_rectangle(call), _triangle(call)):
        outs.append(torch.empty(call.q.shape, dtype=torch.float32, device=out.device))
        sums.append(torch.empty(call.q.shape[:3], dtype=torch.float32, device=out.device))
        run(part, outs[-1], sums[-1], counters)
    of_both = torch.logaddexp(*sums)
    unseen = of_both == -torch.inf
    # Weighted by the sum: a NaN in either part comes out, and rows that see no key have the weight
    # 0.
    shares = [
        (each - of_both).masked_fill(unseen, -torch.inf).exp_().unsqueeze(-1) for each in sums
    ]
    outs[0].mul_(shares[0]).addcmul_(outs[1], shares[1])
    out.copy_(outs[0])
    if lse is not None:
        lse.copy_(of_both)


def _rectangle(call: CheckedCall) -> CheckedCall:
    """Part of the call in which all queries see the keys before theirs."""
    end = call.k.shape[2] - call.q.shape[2]
    mask = call.block_mask
    return replace(
        call,
        k=call.k[:, :, :end],
        v=call.v[:, :, :end],
        block_mask=None if mask is None else mask[..., : end // KEY_BLOCK],
        is_causal=False,
        bottom_right=False,
    )


def _triangle(call: CheckedCall) -> CheckedCall:
    """Part of the call in which all queries see their own keys."""
    first = call.k.shape[2] - call.q.shape[2]
    mask = call.block_mask
    policy = _later(call, first)
    if policy.attention_sink:  # key 0 belongs to the other part
        policy = replace(policy, attention_sink=False)
    return replace(
        call,
        k=call.k[:, :, first:],
        v=call.v[:, :, first:],
        block_mask=None if mask is None else mask[..., first // KEY_BLOCK :],
        policy=policy,
        bottom_right=False,
    )


def _later(call: CheckedCall, first: int) -> SparsePolicy:
    """Policy for what follows `first` tokens of the sequence."""
    policy = call.policy
    if policy.exact_prefix:
        policy = replace(policy, exact_prefix=max(0, policy.exact_prefix - first))
    return policy

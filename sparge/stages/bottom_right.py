# SPDX-License-Identifier: Apache-2.0
"""Causal attention whose last query sees the last key, in parts that are causal from the top left.

With more keys than queries every query sees the first keys, and from there on the call is square:
a rectangle and a triangle, merged by their log-sum-exps. With fewer keys the first queries see
none, and the others are square.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK, QUERY_BLOCK
from ..call import CheckedCall
from .kind import result_size

#: Result in a call's layout, and its log-sum-exps where it asks for them.
Run = Callable[[CheckedCall], tuple[Tensor, "Tensor | None"]]


def run_bottom_right(call: CheckedCall, run: Run) -> tuple[Tensor, Tensor | None]:
    """Makes a call whose queries and keys differ in number, by `run` of its parts."""
    out = call.q.new_empty(result_size(call.out_layout, call.q.shape), dtype=call.out_dtype)
    by_head = out if call.out_layout == "HND" else out.transpose(1, 2)
    part = replace(call, out_layout="HND", ends_with_keys=False)
    in_parts = _last_queries if call.q.shape[2] > call.k.shape[2] else _merged
    return out, in_parts(part, run, by_head)


def _last_queries(call: CheckedCall, run: Run, out: Tensor) -> Tensor | None:
    """Writes `out` (B, H, Nq, D); gives the log-sum-exps."""
    first = call.q.shape[2] - call.k.shape[2]
    mask = call.block_mask
    square = replace(
        call,
        q=call.q[:, :, first:],
        block_mask=None if mask is None else mask[:, :, first // QUERY_BLOCK :],
        exact_prefix=max(0, call.exact_prefix - first),
    )
    out[:, :, :first] = 0
    out[:, :, first:], of_square = run(square)
    if of_square is None:
        return None
    lse = of_square.new_full(call.q.shape[:3], -torch.inf)
    lse[:, :, first:] = of_square
    return lse


def _merged(call: CheckedCall, run: Run, out: Tensor) -> Tensor:
    """Writes `out` (B, H, Nq, D) from a rectangle and a triangle; gives the log-sum-exps."""
    call = replace(call, out_dtype=torch.float32, with_lse=True)
    outs, sums = [], []
    for part in (_rectangle(call), _triangle(call)):
        result, lse = run(part)
        assert lse is not None
        outs.append(result)
        sums.append(lse)
    of_both = torch.logaddexp(*sums)
    unseen = of_both == -torch.inf
    # Weighted by the sum: a NaN in either part comes out, and rows that see no key have the weight
    # 0.
    shares = [
        (each - of_both).masked_fill(unseen, -torch.inf).exp_().unsqueeze(-1) for each in sums
    ]
    outs[0].mul_(shares[0]).addcmul_(outs[1], shares[1])
    out.copy_(outs[0])
    return of_both


def _rectangle(call: CheckedCall) -> CheckedCall:
    """Part of the call in which all queries see the keys before theirs."""
    end = call.k.shape[2] - call.q.shape[2]
    mask = call.block_mask
    return replace(
        call,
        k=call.k[:, :, :end],
        v=call.v[:, :, :end],
        block_mask=None if mask is None else mask[..., : end // KEY_BLOCK],
        causal=False,
    )


def _triangle(call: CheckedCall) -> CheckedCall:
    """Part of the call in which all queries see their own keys."""
    first = call.k.shape[2] - call.q.shape[2]
    mask = call.block_mask
    return replace(
        call,
        k=call.k[:, :, first:],
        v=call.v[:, :, first:],
        block_mask=None if mask is None else mask[..., first // KEY_BLOCK :],
        attention_sink=False,  # key 0 belongs to the other part
        exact_prefix=max(0, call.exact_prefix - first),
    )

# SPDX-License-Identifier: Apache-2.0
"""Exchanges of an engine around a rank's attention: Ulysses' all-to-all, and a ring that merges.

q, k and v (B, N / ranks, H, D) hold some tokens of all heads; after `to_heads` they hold all tokens
of some heads, and `to_tokens` brings a result back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

Attend = Callable[..., tuple[Tensor, Tensor]]


def _all_to_all(x: Tensor) -> Tensor:
    """First dimension: the rank that it is for; of the result the one that it comes from."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def to_heads(x: Tensor) -> Tensor:
    """(B, N / ranks, H, D) -> (B, N, H / ranks, D): tokens of rank 0, of rank 1, ..."""
    dealt = x.unflatten(2, (dist.get_world_size(), -1)).movedim(2, 0)
    return _all_to_all(dealt).movedim(0, 1).flatten(1, 2)


def to_tokens(x: Tensor) -> Tensor:
    """(B, N, H / ranks, D) -> (B, N / ranks, H, D)."""
    dealt = x.unflatten(1, (dist.get_world_size(), -1)).movedim(1, 0)
    return _all_to_all(dealt).movedim(0, 2).flatten(2, 3)


def ring(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a rank's queries over the keys of all ranks, merged chunk by chunk.

    attend: takes q, k and v (B, N / ranks, H, D); gives the result in that layout and the natural
        log-sum-exp (B, H, N / ranks).
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    chunks = []
    for x in (k.contiguous(), v.contiguous()):
        found = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(found, x)
        chunks.append(found)
    out, lse = None, None
    for step in range(ranks):
        of = (rank + step) % ranks
        part, of_part = attend(q, chunks[0][of], chunks[1][of])
        part, of_part = part.float(), of_part.transpose(1, 2).unsqueeze(-1)
        if out is None or lse is None:
            out, lse = part, of_part
        else:
            out = out + torch.sigmoid(of_part - lse) * (part - out)
            lse = lse - functional.logsigmoid(lse - of_part)
    assert out is not None
    return out.to(q.dtype)

# SPDX-License-Identifier: Apache-2.0
"""The error of every candidate from the parts of one exact pass.

With the first t buckets of blocks exact and the others pooled with gain g, attention gives
(A + g R) / (a + g r): A, a the sums over exact keys, R, r those over pseudo-keys. That is a mix of
the outputs of both parts, e = A / a and p = R / r, with the weight w = a / (a + g r), so that

    |w e + (1 - w) p - o|^2 = w^2 |e - o|^2 + 2 w (1 - w) <e - o, p - o> + (1 - w)^2 |p - o|^2

and three products a row and density serve all gains. On a GPU it is the number of operations that
counts, which each have little to do, and the memory of what has channels: so routers and densities
are dimensions here, and outputs are overwritten where they were last wanted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..reference.partial import Partial

LOG_2 = math.log(2)  # natural logs of a unit of row_max


@dataclass(frozen=True, eq=False)
class Distances:
    """How far the two outputs of each density lie from the true one, o; all float32.

    near |e - o|^2 (routers, densities, ...); between <e - o, p - o>, far |p - o|^2 and advantage
    ln(a / r) (routers, densities - 1, ...), because the last density pools nothing; norm |o|^2
    (...).
    """

    near: Tensor
    between: Tensor
    far: Tensor
    advantage: Tensor
    norm: Tensor


def distances(
    exact: Partial,
    pooled: Partial,
    unit: Tensor | float = 1.0,
    pieces: Sequence[int] | None = None,
) -> Distances:
    """Of the exact buckets, in pieces (routers, pieces, ..., D), and of all that each density pools
    (routers, densities - 1, ..., D).

    What is true is the exact output, as the first router splits it. `pooled.unnormalised` may be of
    any float type and counts in `unit`s, which broadcast to (...); one router of it at a time is
    held in float32. pieces: those of each density's bucket, one each by default.
    """
    values, exact_logs = _running(exact, pieces or [1] * exact.row_sum.shape[1])
    truth = values[0, -1].clone()
    errors = values.sub_(truth)
    scales = (_inverse(pooled.row_sum) * unit).unsqueeze(-1)
    beside = [
        _beside(*router, truth)
        for router in zip(errors[:, :-1], pooled.unnormalised, scales, strict=True)
    ]
    between, far = (torch.stack(each) for each in zip(*beside, strict=True))
    return Distances(
        _squared(errors),
        between,
        far,
        exact_logs[:, :-1] - _log_sum(pooled),
        _squared(truth),
    )


def _beside(error: Tensor, sums: Tensor, scale: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """<e - o, p - o> and |p - o|^2 of one router. A function of its own so that p is freed."""
    other = (sums * scale).sub_(truth)
    far = _squared(other)
    return other.mul_(error).sum(-1), far


def bucket_distances(by_router: Sequence[Sequence[tuple[Partial, Partial]]]) -> Distances:
    """Of each router the exact and the pooled part of each bucket."""
    exact = [_stacked([of_exact for of_exact, _ in parts]) for parts in by_router]
    pooled = []
    for parts in by_router:
        from_last = accumulate((of_pooled for _, of_pooled in parts[:0:-1]), Partial.plus)
        pooled.append(_stacked(list(from_last)[::-1]))
    return distances(_stacked(exact), _stacked(pooled))


def squared_errors(measured: Distances, log_gains: Tensor) -> Tensor:
    """(routers, densities, ..., gains) float32: squared distance of each row's output from truth.

    log_gains (gains,) float32, natural, -inf for plain dropping. Rows that neither part reaches
    give 0, as attention does.
    """
    near, between, far, advantage = (
        x.unsqueeze(-1) for x in (measured.near, measured.between, measured.far, measured.advantage)
    )
    lead = advantage - log_gains
    # NaN where there is neither part, so that both outputs are 0.
    w, rest = lead.sigmoid().nan_to_num_(1.0), lead.neg_().sigmoid_().nan_to_num_(0.0)
    # A pooled part as good as the exact one may leave a sum just below 0.
    mixed = (w * w * near[:, :-1] + 2 * w * rest * between + rest * rest * far).clamp_(min=0)
    return torch.cat([mixed, near[:, -1:].expand_as(mixed[:, :1])], 1)


def _stacked(parts: Sequence[Partial]) -> Partial:
    fields = ((part.unnormalised, part.row_max, part.row_sum) for part in parts)
    return Partial(*(torch.stack(each) for each in zip(*fields, strict=True)))


def _running(parts: Partial, pieces: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of the first 1, 2 ... buckets together, outputs (routers, densities, ..., D), 0 where they
    have no key, and natural logs of their sums of exponentials, -inf there.

    One product of a (densities, pieces) matrix a row: few large operations. Its weights are shares
    of what the density keeps: a part may be all there is to a row although its weight beside later
    ones underflows.
    """
    logs = _log_sum(parts)
    ends = list(accumulate(pieces))
    running = logs.logcumsumexp(1)
    together = torch.stack([running[:, end - 1] for end in ends], 1)
    weights = logs.unsqueeze(1) - together.unsqueeze(2)
    later = torch.ones(len(logs[0]), len(logs[0]), dtype=torch.bool, device=logs.device).triu_(1)
    later = torch.stack([later[end - 1] for end in ends])
    weights.masked_fill_(later.view(*later.shape, *[1] * (logs.dim() - 2)), -torch.inf)
    weights.exp_().nan_to_num_(0.0)  # NaN: no key so far
    weights.mul_(_inverse(parts.row_sum).unsqueeze(1))
    values = weights.movedim((1, 2), (-2, -1)) @ parts.unnormalised.movedim(1, -2)
    return values.movedim(-2, 1), together


def _log_sum(part: Partial) -> Tensor:
    return (part.row_max + part.row_sum.log2()).mul_(LOG_2)


def _inverse(sums: Tensor) -> Tensor:
    return (1 / sums).nan_to_num_(posinf=0.0)


def _squared(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1).square_()

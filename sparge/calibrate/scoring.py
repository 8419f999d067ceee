# SPDX-License-Identifier: Apache-2.0
"""The error of every candidate from the parts of one exact pass.

With the first t buckets of blocks exact and the others pooled with gain g, attention gives
(A + g R) / (a + g r): A, a the sums over exact keys, R, r those over pseudo-keys. That is a mix of
the outputs of both parts, e = A / a and p = R / r, with the weight w = a / (a + g r), so that

    |w e + (1 - w) p - o|^2 = w^2 |e - o|^2 + 2 w (1 - w) <e - o, p - o> + (1 - w)^2 |p - o|^2

and three products a row and density serve all gains. The outputs y_u of pieces of the kept keys
make e - o = sum_u w_u (y_u - o), so products of all pairs of y_u - o, p_t - o and o are all that
is needed of the channels: few operations for a group of heads, the rest for all heads together. On
a GPU it is the number of operations that counts here, which each have little to do, and the memory
of what has channels; so routers, densities and pieces are dimensions. Around o, because products
around 0 would lose a small e - o in rounding.
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


@dataclass(frozen=True, eq=False)
class Products:
    """Of each row the products of all pairs of vectors: of each piece y_u - o, of each density but
    the last p_t - o, then o; all float32.

    gram (routers, ..., pieces + densities, pieces + densities); exact_logs (routers, pieces, ...)
    and pooled_logs (routers, densities - 1, ...): natural logs of sums of exponentials, -inf where
    there is no key.
    """

    gram: Tensor
    exact_logs: Tensor
    pooled_logs: Tensor


def products(exact: Partial, pooled: Partial, unit: Tensor | float = 1.0) -> Products:
    """Of the exact buckets, in pieces (routers, pieces, ..., D), and of all that each density pools
    (routers, densities - 1, ..., D).

    What is true is the exact output, as the first router splits it. `pooled.unnormalised` may be of
    any float type and counts in `unit`s, which broadcast to (...).
    """
    values, others = (part.unnormalised.movedim(1, -2) for part in (exact, pooled))
    pieces, count = values.shape[-2], values.shape[-2] + others.shape[-2]
    vectors = values.new_empty(*values.shape[:-2], count + 1, values.shape[-1])
    for part, place, scale in (
        (values, slice(pieces), _inverse(exact.row_sum)),
        (others, slice(pieces, count), _inverse(pooled.row_sum) * unit),
    ):
        torch.mul(part, scale.movedim(1, -1).unsqueeze(-1), out=vectors[..., place, :])
    exact_logs = _log_sum(exact)
    shares = exact_logs[0].softmax(0).nan_to_num_(0.0).movedim(0, -1)  # NaN: no key
    truth = shares.unsqueeze(-2) @ vectors[0, ..., :pieces, :]
    vectors[..., :count, :] -= truth
    vectors[..., count:, :] = truth
    return Products(vectors @ vectors.transpose(-1, -2), exact_logs, _log_sum(pooled))


def distances(found: Products, pieces: Sequence[int]) -> Distances:
    """pieces: into how many the bucket of each density was cut."""
    gram = found.gram
    first, last = sum(pieces), gram.shape[-1] - 1  # places of the first p_t - o and of o
    shares, exact_logs = _running(found.exact_logs, pieces)
    weights = torch.zeros_like(gram[..., : len(pieces), :])
    weights[..., :first] = shares
    weights[..., last] = shares.sum(-1).sub_(1)  # 0, but -1 where there is no key so far: e = 0
    errors = weights @ gram
    between = errors[..., :-1, first:last].diagonal(dim1=-2, dim2=-1)
    far = gram.diagonal(dim1=-2, dim2=-1)[..., first:last]
    return Distances(
        (errors * weights).sum(-1).clamp_(min=0).movedim(-1, 1),
        between.movedim(-1, 1),
        far.movedim(-1, 1),
        exact_logs[:, :-1] - found.pooled_logs,
        gram[0, ..., last, last],
    )


def bucket_distances(by_router: Sequence[Sequence[tuple[Partial, Partial]]]) -> Distances:
    """Of each router the exact and the pooled part of each bucket."""
    exact = [_stacked([of_exact for of_exact, _ in parts]) for parts in by_router]
    pooled = []
    for parts in by_router:
        from_last = accumulate((of_pooled for _, of_pooled in parts[:0:-1]), Partial.plus)
        pooled.append(_stacked(list(from_last)[::-1]))
    found = products(_stacked(exact), _stacked(pooled))
    return distances(found, [1] * len(by_router[0]))


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


def _running(logs: Tensor, pieces: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of logs (routers, pieces, ...) the shares (routers, ..., densities, pieces) of each piece in
    what a density keeps, and the logs (routers, densities, ...) of that.

    Shares of what is kept: it may be all there is to a row although its weight beside later pieces
    underflows.
    """
    ends = list(accumulate(pieces))
    running = logs.logcumsumexp(1)
    kept = torch.stack([running[:, end - 1] for end in ends], 1)
    shares = logs.movedim(1, -1).unsqueeze(-2) - kept.movedim(1, -1).unsqueeze(-1)
    later = torch.ones(ends[-1], ends[-1], dtype=torch.bool, device=logs.device).triu_(1)
    later = torch.stack([later[end - 1] for end in ends])
    return shares.masked_fill_(later, -torch.inf).exp_().nan_to_num_(0.0), kept  # NaN: no key


def _log_sum(part: Partial) -> Tensor:
    return (part.row_max + part.row_sum.log2()).mul_(LOG_2)


def _inverse(sums: Tensor) -> Tensor:
    return sums.reciprocal().nan_to_num_(posinf=0.0)

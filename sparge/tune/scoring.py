# SPDX-License-Identifier: Apache-2.0
"""Error of every candidate from the parts of one exact pass.

With the first t buckets of blocks exact and the others pooled with pool weight g, attention gives
(A + g R) / (a + g r): A, a the sums over exact keys, R, r those over pseudo-keys. That is a mix of
the outputs of both parts, e = A / a and p = R / r, with the weight w = a / (a + g r), so that

    |w e + (1 - w) p - o|^2 = w^2 |e - o|^2 + 2 w (1 - w) <e - o, p - o> + (1 - w)^2 |p - o|^2

and three products a row and density serve all pool weights. An output scale c makes
c y + (1 - c) m of an output y, with m the mean value of all keys, so that

    |c y + (1 - c) m - o|^2 = c^2 |y - o|^2 + 2 c (1 - c) <y - o, m - o> + (1 - c)^2 |m - o|^2

and <e - o, m - o>, <p - o, m - o> and |m - o|^2 are what that takes beside them. The outputs y_u of
buckets of kept keys make e - o = sum_u w_u (y_u - o), so products of all pairs of y_u - o,
p_t - o, m - o and o are all that is needed of the channels.

On a GPU the number of operations counts here, and the memory of what has channels. So densities and
buckets are dimensions, few operations serve a group of heads, and the rest serves all heads
together. Vectors are taken around o, because products around 0 would lose a small e - o in
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..common.partial import Partial

LOG_2 = math.log(2)  # turns a unit of row_max into natural logs
_LEAST_SUM = 1e-30  # below every sum of weights but that of no key, whose values sum to 0


@dataclass(frozen=True, eq=False)
class Distances:
    """Squared distances of each density's outputs from the true one, o; all float32.

    near: (densities, ...), |e - o|^2.
    between, far, advantage: (densities - 1, ...), <e - o, p - o>, |p - o|^2 and ln(a / r); the last
        density drops nothing.
    kept_towards_mean, pooled_towards_mean: of the same shape, <e - o, m - o> and <p - o, m - o>.
    norm, mean_far: (...), |o|^2 and |m - o|^2.
    """

    near: Tensor
    between: Tensor
    far: Tensor
    advantage: Tensor
    kept_towards_mean: Tensor
    pooled_towards_mean: Tensor
    norm: Tensor
    mean_far: Tensor

    @staticmethod
    def packed_fields(densities: int) -> int:
        """Number of values a row has in `packed`."""
        return sum(_field_counts(densities))

    @classmethod
    def of_packed(cls, packed: Tensor) -> Distances:
        """Reads what `packed` gave."""
        densities = (packed.shape[0] + 3) // 6
        *by_density, of_rows = packed.split(_field_counts(densities))
        return cls(*by_density, *of_rows)

    def packed(self) -> Tensor:
        """(`packed_fields`, ...): a copy, because fields are views of something far larger."""
        of_outputs = (self.near, self.between, self.far, self.advantage)
        of_mean = (self.kept_towards_mean, self.pooled_towards_mean)
        return torch.cat([*of_outputs, *of_mean, self.norm[None], self.mean_far[None]])


@dataclass(frozen=True, eq=False)
class Products:
    """Products of all pairs of vectors in each row, float32.

    The vectors: y_u - o of each bucket, p_t - o of each density but the last, m - o, and o. gram:
    (..., n, n), n = 2 densities + 1. exact_logs: (..., densities), natural logs of sums of
    exponentials, -inf where there is no key. pooled_max, pooled_sum: (densities - 1, ...), as in
    `Partial`.
    """

    gram: Tensor
    exact_logs: Tensor
    pooled_max: Tensor
    pooled_sum: Tensor


def products(exact: Partial, pooled: Partial, mean_value: Tensor) -> Products:
    """Products for the exact buckets (densities, ..., D), and for what each density pools
    (densities - 1, ..., D).

    The true output is the exact one of all buckets. mean_value: m, broadcasts to (..., D).
    """
    values, others = (part.unnormalised.movedim(0, -2) for part in (exact, pooled))
    buckets, count = values.shape[-2], values.shape[-2] + others.shape[-2]
    vectors = values.new_empty(*values.shape[:-2], count + 2, values.shape[-1])
    for part, sums, vector in (
        (values, exact.row_sum, vectors[..., :buckets, :]),
        (others, pooled.row_sum, vectors[..., buckets:count, :]),
    ):
        torch.div(part, sums.clamp(min=_LEAST_SUM).movedim(0, -1).unsqueeze(-1), out=vector)
    vectors[..., count, :] = mean_value
    exact_logs = torch.add(exact.row_sum.log(), exact.row_max, alpha=LOG_2).movedim(0, -1)
    shares = exact_logs.softmax(-1).nan_to_num_(0.0)  # NaN where there is no key
    truth = shares.unsqueeze(-2) @ vectors[..., :buckets, :]
    vectors[..., count + 1 :, :] = truth
    vectors[..., : count + 1, :].sub_(truth)
    gram = vectors @ vectors.transpose(-1, -2)
    return Products(gram, exact_logs, pooled.row_max, pooled.row_sum)


def distances(found: Products) -> Distances:
    """Distances from products."""
    gram = found.gram
    # Indices of the first p_t - o, of m - o and of o.
    first, mean, last = found.exact_logs.shape[-1], gram.shape[-1] - 2, gram.shape[-1] - 1
    # Logs of all that a density keeps. Shares are of that: it may be all there is to a row although
    # its weight beside later buckets underflows.
    kept = found.exact_logs.logcumsumexp(-1)
    weights = torch.zeros_like(gram[..., :first, :])
    shares = weights[..., :first]
    torch.sub(found.exact_logs.unsqueeze(-2), kept.unsqueeze(-1), out=shares)
    later = torch.ones(first, first, dtype=torch.bool, device=gram.device).triu_(1)
    shares.masked_fill_(later, -torch.inf)
    shares.exp_().nan_to_num_(0.0)  # NaN where there is no key
    # 0, but -1 where there is no key so far: e = 0
    torch.sum(shares, -1, out=weights[..., last]).sub_(1)
    errors = weights @ gram
    between = errors[..., :-1, first:mean].diagonal(dim1=-2, dim2=-1)
    far = gram.diagonal(dim1=-2, dim2=-1)[..., first:mean]
    kept_logs = kept[..., :-1].movedim(-1, 0)
    pooled_logs = torch.add(found.pooled_sum.log(), found.pooled_max, alpha=LOG_2)
    return Distances(
        (errors * weights).sum(-1).clamp_(min=0).movedim(-1, 0),
        between.movedim(-1, 0),
        far.movedim(-1, 0),
        kept_logs - pooled_logs,
        errors[..., :-1, mean].movedim(-1, 0),
        gram[..., first:mean, mean].movedim(-1, 0),
        gram[..., last, last],
        gram[..., mean, mean],
    )


def bucket_distances(parts: Sequence[tuple[Partial, Partial]], mean_value: Tensor) -> Distances:
    """Distances from the exact and the pooled part of each bucket; mean_value as in `products`."""
    exact = _stacked([of_exact for of_exact, _ in parts])
    from_last = accumulate((of_pooled for _, of_pooled in parts[:0:-1]), Partial.plus)
    pooled = _stacked(list(from_last)[::-1])
    return distances(products(exact, pooled, mean_value))


def squared_errors(measured: Distances, log_pool_weights: Tensor) -> Tensor:
    """(densities, ..., pool weights) float32: squared distance of each row's output from the truth.

    log_pool_weights (pool weights,) float32, natural; the first is -inf, plain dropping. Rows that
    neither part reaches give 0, as attention does.
    """
    near = measured.near
    errors = near.new_empty(*near.shape, len(log_pool_weights))
    errors[..., 0] = near
    near = near.unsqueeze(-1)
    errors[-1:] = near[-1:]
    lead = log_pool_weights[1:] - measured.advantage.unsqueeze(-1)
    between, far = (x.unsqueeze(-1) for x in (measured.between, measured.far))
    _mix(near[:-1], between, far, lead, errors[:-1, ..., 1:])
    # A pooled part as good as the exact one may leave a sum just below 0.
    return errors.clamp_(min=0)


def towards_mean(measured: Distances, log_pool_weights: Tensor) -> Tensor:
    """Products <y - o, m - o> for the outputs y of `squared_errors`, of the same shape; 0 where
    nothing is dropped."""
    found = measured.near.new_zeros(*measured.near.shape, len(log_pool_weights))
    kept, pooled = measured.kept_towards_mean, measured.pooled_towards_mean
    found[:-1, ..., 0] = kept
    rest = _rest(log_pool_weights[1:] - measured.advantage.unsqueeze(-1))
    torch.lerp(kept.unsqueeze(-1), pooled.unsqueeze(-1), rest, out=found[:-1, ..., 1:])
    return found


def _mix(near: Tensor, between: Tensor, far: Tensor, lead: Tensor, out: Tensor) -> None:
    """Squared errors of mixes whose second part leads by `lead`, which this overwrites.

    Computed by lerps, since these are the largest tensors of a measurement: one of shares beside
    `out`.
    """
    rest = _rest(lead)
    torch.lerp(near, between, rest, out=out)
    out.lerp_(torch.lerp(between, far, rest), rest)


def _rest(lead: Tensor) -> Tensor:
    """Share of the second part, which leads by `lead`, in a mix; computed in its place. 0 where
    there is neither part (NaN), so that both outputs are 0."""
    return lead.sigmoid_().nan_to_num_(0.0)


def _field_counts(densities: int) -> list[int]:
    """Widths of the fields of `Distances.packed`: of each that densities have, and of all that rows
    have."""
    return [densities, *[densities - 1] * 5, 2]


def _stacked(parts: Sequence[Partial]) -> Partial:
    fields = ((part.unnormalised, part.row_max, part.row_sum) for part in parts)
    return Partial(*(torch.stack(each) for each in zip(*fields, strict=True)))

# SPDX-License-Identifier: Apache-2.0
"""Error of every candidate from the parts of one exact pass.

With the first t buckets of blocks exact and the others pooled with pool weight g, attention gives
(A + g R) / (a + g r): A, a the sums over exact keys, R, r those over pseudo-keys. That is a mix of
the outputs of both parts, e = A / a and p = R / r, with the weight w = a / (a + g r), so that

    |w e + (1 - w) p - o|^2 = w^2 |e - o|^2 + 2 w (1 - w) <e - o, p - o> + (1 - w)^2 |p - o|^2

and three products a row and density serve all pool weights. An output scale c makes
c y + (1 - c) m of an output y, with m the mean value of all keys, so that

    |c y + (1 - c) m - o|^2 = c^2 |y - o|^2 + 2 c (1 - c) <y - o, m - o> + (1 - c)^2 |m - o|^2

and <e - o, m - o>, <p - o, m - o> and |m - o|^2 are what that takes beside them. Vectors are taken
around o, because products around 0 would lose a small e - o in rounding. `csrc/score.cu` finds the
same products on a GPU, of all densities and buckets at once.
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
        """(`packed_fields`, ...): all fields."""
        of_outputs = (self.near, self.between, self.far, self.advantage)
        of_mean = (self.kept_towards_mean, self.pooled_towards_mean)
        return torch.cat([*of_outputs, *of_mean, self.norm[None], self.mean_far[None]])


def distances(exact: Sequence[Partial], pooled: Sequence[Partial], mean_value: Tensor) -> Distances:
    """Distances from the exact part of each bucket, and from what each density but the last pools;
    parts (..., D).

    The true output is the exact one of all buckets. mean_value: m, broadcasts to (..., D).
    """
    kept = list(accumulate(exact, Partial.plus))
    truth = kept[-1].output()
    of_kept = torch.stack([part.output() for part in kept]) - truth
    of_pooled = torch.stack([part.output() for part in pooled]) - truth
    of_mean = mean_value - truth
    advantages = [_log_sum(a) - _log_sum(r) for a, r in zip(kept[:-1], pooled, strict=True)]
    return Distances(
        near=_products(of_kept, of_kept),
        between=_products(of_kept[:-1], of_pooled),
        far=_products(of_pooled, of_pooled),
        advantage=torch.stack(advantages),
        kept_towards_mean=_products(of_kept[:-1], of_mean),
        pooled_towards_mean=_products(of_pooled, of_mean),
        norm=_products(truth, truth),
        mean_far=_products(of_mean, of_mean),
    )


def bucket_distances(parts: Sequence[tuple[Partial, Partial]], mean_value: Tensor) -> Distances:
    """Distances from the exact and the pooled part of each bucket; mean_value as in `distances`."""
    from_last = accumulate((of_pooled for _, of_pooled in parts[:0:-1]), Partial.plus)
    return distances([of_exact for of_exact, _ in parts], list(from_last)[::-1], mean_value)


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


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Products of vectors (..., D)."""
    return (a * b).sum(-1)


def _log_sum(part: Partial) -> Tensor:
    """Natural log of the sum of a part's weights; -inf where there is no key."""
    return torch.add(part.row_sum.log(), part.row_max, alpha=LOG_2)

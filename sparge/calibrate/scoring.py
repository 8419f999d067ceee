# SPDX-License-Identifier: Apache-2.0
"""The error of every candidate from the parts of one exact pass.

With the first t buckets of blocks exact and the others pooled with gain g, attention gives
(A + g R) / (a + g r): A, a the sums over exact keys, R, r those over pseudo-keys. That is a mix of
the outputs of both parts, e = A / a and p = R / r, with the weight w = a / (a + g r), so that

    |w e + (1 - w) p - o|^2 = w^2 |e - o|^2 + 2 w (1 - w) <e - o, p - o> + (1 - w)^2 |p - o|^2

and three products a row and density serve all gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..reference.partial import Partial

#: Of each bucket of blocks its exact part and its pooled part (with gain 1).
Parts = Sequence[tuple[Partial, Partial]]


def squared_errors(parts: Parts, gains: Sequence[float], truth: Tensor) -> Tensor:
    """(..., R, densities, gains) float32: squared distance of each row's output from `truth`.

    Density t has the buckets 0 .. t exact, so there are as many as buckets. `truth` (..., R, D).
    Rows that neither part reaches give 0, as attention does.
    """
    exact = list(accumulate((exact for exact, _ in parts), Partial.plus))
    pooled = list(accumulate((pooled for _, pooled in reversed(parts[1:])), Partial.plus))
    pooled = [*reversed(pooled), _without_keys(exact[0])]
    return torch.stack(
        [_mixed(*both, gains, truth) for both in zip(exact, pooled, strict=True)], -2
    )


def exact_output(parts: Parts) -> Tensor:
    """(..., R, D): the output with all blocks exact."""
    *_, whole = accumulate((exact for exact, _ in parts), Partial.plus)
    return whole.output()


def _mixed(exact: Partial, pooled: Partial, gains: Sequence[float], truth: Tensor) -> Tensor:
    from_exact, from_pooled = exact.output() - truth, pooled.output() - truth
    near = from_exact.square().sum(-1)
    between = (from_exact * from_pooled).sum(-1)
    far = from_pooled.square().sum(-1)
    advantage = _log_sum(exact) - _log_sum(pooled)
    return torch.stack([_mix(near, between, far, advantage, gain) for gain in gains], -1)


def _mix(near: Tensor, between: Tensor, far: Tensor, advantage: Tensor, gain: float) -> Tensor:
    """`advantage`: natural log of a / r; NaN where there is neither, so that both outputs are 0."""
    log_gain = near.new_full((), gain).log()
    w = torch.sigmoid(advantage - log_gain).nan_to_num(1.0)
    rest = torch.sigmoid(log_gain - advantage).nan_to_num(0.0)
    # A pooled part as good as the exact one may leave a sum just below 0.
    return (w * w * near + 2 * w * rest * between + rest * rest * far).clamp(min=0)


def _log_sum(part: Partial) -> Tensor:
    """Natural log of the sum of exponentials; -inf where the part has no key."""
    return (part.row_max + part.row_sum.log2()) * torch.log(part.row_sum.new_full((), 2.0))


def _without_keys(like: Partial) -> Partial:
    return Partial(
        torch.zeros_like(like.unnormalised),
        torch.full_like(like.row_max, -torch.inf),
        torch.zeros_like(like.row_sum),
    )

# SPDX-License-Identifier: Apache-2.0
"""The error of every candidate from the parts of one exact pass.

With the first t buckets of blocks exact and the others pooled with gain g, attention gives
(A + g R) / (a + g r): A, a the sums over exact keys, R, r those over pseudo-keys. That is a mix of
the outputs of both parts, e = A / a and p = R / r, with the weight w = a / (a + g r), so that

    |w e + (1 - w) p - o|^2 = w^2 |e - o|^2 + 2 w (1 - w) <e - o, p - o> + (1 - w)^2 |p - o|^2

and three products a row and density serve all gains. Outputs of more and more parts are running
means, and what has no channels is computed for all densities at once: on a GPU it is the number of
operations that counts, which each have little to do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..reference.partial import Partial

LOG_2 = math.log(2)  # natural logs of a unit of row_max

#: Of each bucket of blocks its exact part and its pooled part (with gain 1).
Parts = Sequence[tuple[Partial, Partial]]


def squared_errors(parts: Parts, gains: Sequence[float], truth: Tensor) -> Tensor:
    """(..., R, densities, gains) float32: squared distance of each row's output from `truth`.

    Density t has the buckets 0 .. t exact, so there are as many as buckets. `truth` (..., R, D).
    Rows that neither part reaches give 0, as attention does.
    """
    exact, exact_logs = _running([exact for exact, _ in parts])
    pooled, pooled_logs = _running([_without_keys(parts[0][1]), *(p for _, p in parts[:0:-1])])
    products: list[tuple[Tensor, Tensor, Tensor]] = []
    for from_exact, from_pooled in zip(exact, reversed(list(pooled)), strict=True):
        e, p = from_exact - truth, from_pooled - truth
        products.append(((e * e).sum(-1), (e * p).sum(-1), (p * p).sum(-1)))
    near, between, far = (
        torch.stack(each, -1).unsqueeze(-1) for each in zip(*products, strict=True)
    )
    advantage = (exact_logs - pooled_logs.flip(0)).movedim(0, -1).unsqueeze(-1)
    log_gains = torch.stack([truth.new_full((), gain) for gain in gains]).log()
    # NaN where there is neither part, so that both outputs are 0.
    w = torch.sigmoid(advantage - log_gains).nan_to_num(1.0)
    rest = torch.sigmoid(log_gains - advantage).nan_to_num(0.0)
    # A pooled part as good as the exact one may leave a sum just below 0.
    return (w * w * near + 2 * w * rest * between + rest * rest * far).clamp(min=0)


def exact_output(parts: Parts) -> Tensor:
    """(..., R, D): the output with all blocks exact."""
    outputs, _ = _running([exact for exact, _ in parts])
    *_, whole = outputs
    return whole


def _running(parts: Sequence[Partial]) -> tuple[Iterator[Tensor], Tensor]:
    """Of the first 1, 2 ... parts together, outputs (..., R, D), 0 where they have no key, and
    (parts, ..., R) natural logs of their sums of exponentials, -inf there."""
    sums = torch.stack([part.row_sum for part in parts])
    logs = (torch.stack([part.row_max for part in parts]) + sums.log2()) * LOG_2
    together = logs.logcumsumexp(0)
    shares = (logs - together).exp().nan_to_num(0.0)  # NaN: no key so far
    inverse = (1 / sums).nan_to_num(posinf=0.0)

    def outputs() -> Iterator[Tensor]:
        mean = torch.zeros_like(parts[0].unnormalised)
        for part, share, scale in zip(parts, shares, inverse, strict=True):
            own = part.unnormalised * scale.unsqueeze(-1)
            mean = torch.lerp(mean, own, share.unsqueeze(-1))
            yield mean

    return outputs(), together


def _without_keys(like: Partial) -> Partial:
    return Partial(
        torch.zeros_like(like.unnormalised),
        torch.full_like(like.row_max, -torch.inf),
        torch.zeros_like(like.row_sum),
    )

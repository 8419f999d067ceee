# SPDX-License-Identifier: Apache-2.0
"""Errors of all candidates from parts, against a softmax over all keys and pseudo-keys at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparge.calibrate.scoring import exact_output, squared_errors
from sparge.reference.partial import Partial

GAINS = [0.0, 0.3, 1.0, 2.5]
LOG2_E = 1.4426950408889634


def part(logits: Tensor, values: Tensor) -> Partial:
    """Natural logits (R, n) over values (n, D)."""
    log2 = logits * LOG2_E
    top = log2.amax(-1) if logits.shape[1] else torch.full(logits.shape[:1], -torch.inf)
    p = torch.exp2(log2 - top.masked_fill(top == -torch.inf, 0).unsqueeze(-1))
    return Partial(p @ values, top, p.sum(-1))


def softmax_output(logits: Tensor, values: Tensor) -> Tensor:
    return (logits.double().softmax(-1) @ values.double()).float()


@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_every_density_and_gain(generator: torch.Generator, spread: float) -> None:
    sizes = [(5, 1), (0, 0), (7, 2), (3, 3)]  # exact keys and pseudo-keys of each bucket
    keys = [
        [
            (
                torch.randn(6, n, generator=generator) * spread,
                torch.randn(n, 4, generator=generator),
            )
            for n in pair
        ]
        for pair in sizes
    ]
    parts = [(part(*exact), part(*pooled)) for exact, pooled in keys]
    truth = torch.randn(6, 4, generator=generator)
    found = squared_errors(parts, GAINS, truth)
    assert found.shape == (6, len(sizes), len(GAINS))
    for density in range(len(sizes)):
        for index, gain in enumerate(GAINS):
            taken = [exact for exact, _ in keys[: density + 1]]
            if gain:
                dropped = [pooled for _, pooled in keys[density + 1 :]]
                weight = torch.log(torch.tensor(gain))
                taken += [(logits + weight, values) for logits, values in dropped]
            logits = torch.cat([logits for logits, _ in taken], 1)
            values = torch.cat([values for _, values in taken])
            expected = (softmax_output(logits, values) - truth).square().sum(-1)
            torch.testing.assert_close(found[:, density, index], expected, rtol=1e-4, atol=1e-6)
    whole = torch.cat([exact[0] for exact, _ in keys], 1), torch.cat([e[1] for e, _ in keys])
    torch.testing.assert_close(exact_output(parts), softmax_output(*whole))


def test_kept_keys_far_below_the_dropped_ones() -> None:
    """Their weight beside the pseudo-keys underflows; with gain 0 they are all there is."""
    kept = part(torch.full((1, 2), -500.0), torch.ones(2, 3))
    dropped = part(torch.zeros(1, 2), torch.full((2, 3), 7.0))
    found = squared_errors([(kept, kept), (dropped, dropped)], [0.0, 1.0], torch.zeros(1, 3))
    torch.testing.assert_close(found[0, 0], torch.tensor([3.0, 3 * 49.0]))
    torch.testing.assert_close(found[0, 1], torch.tensor([3 * 49.0, 3 * 49.0]))


def test_rows_that_reach_no_key_give_zero() -> None:
    none = part(torch.zeros(1, 0), torch.zeros(0, 3))
    some = part(torch.zeros(1, 1), torch.full((1, 3), 2.0))
    found = squared_errors([(none, none), (none, some)], [0.0, 1.0], torch.ones(1, 3))
    torch.testing.assert_close(found[0, 0], torch.tensor([3.0, 3.0]))  # |0 - 1|^2, |2 - 1|^2
    torch.testing.assert_close(found[0, 1], torch.tensor([3.0, 3.0]))
    nothing = squared_errors([(none, none), (none, none)], [0.0, 1.0], torch.ones(1, 3))
    assert nothing.flatten().tolist() == [3.0] * 4

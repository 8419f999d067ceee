# SPDX-License-Identifier: Apache-2.0
"""Errors of all candidates from parts, against a softmax over all keys and pseudo-keys at once."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import reduce

import pytest
import torch
from torch import Tensor

from sparge.common.partial import Partial
from sparge.tune.scoring import (
    Distances,
    bucket_distances,
    squared_errors,
    towards_mean,
)

GAINS = [0.0, 0.3, 1.0, 2.5]
NO_MEAN = torch.zeros(1)
LOG2_E = 1.4426950408889634


def part(logits: Tensor, values: Tensor) -> Partial:
    """Natural logits (R, n) over values (n, D)."""
    log2 = logits * LOG2_E
    top = log2.amax(-1) if logits.shape[1] else torch.full(logits.shape[:1], -torch.inf)
    p = torch.exp2(log2 - top.masked_fill(top == -torch.inf, 0).unsqueeze(-1))
    return Partial(p @ values, top, p.sum(-1))


def errors(parts: list[tuple[Partial, Partial]], pool_weights: list[float]) -> Tensor:
    """(densities, rows, pool weights)."""
    return squared_errors(bucket_distances(parts, NO_MEAN), torch.tensor(pool_weights).log())


def products_with_mean(parts: list[tuple[Partial, Partial]], mean: Tensor) -> Tensor:
    """(densities, rows, pool weights)."""
    return towards_mean(bucket_distances(parts, mean), torch.tensor(GAINS).log())


def softmax_output(logits: Tensor, values: Tensor) -> Tensor:
    return (logits.double().softmax(-1) @ values.double()).float()


@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_every_density_and_pool_weight(generator: torch.Generator, spread: float) -> None:
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
    mean = torch.randn(4, generator=generator)
    found, towards = errors(parts, GAINS), products_with_mean(parts, mean)
    whole = torch.cat([exact[0] for exact, _ in keys], 1), torch.cat([e[1] for e, _ in keys])
    truth = softmax_output(*whole)
    assert found.shape == (len(sizes), 6, len(GAINS))
    for density in range(len(sizes)):
        for index, pool_weight in enumerate(GAINS):
            taken = [exact for exact, _ in keys[: density + 1]]
            if pool_weight:
                pooled = [of_bucket for _, of_bucket in keys[density + 1 :]]
                weight = math.log(pool_weight)
                taken += [(logits + weight, values) for logits, values in pooled]
            logits = torch.cat([logits for logits, _ in taken], 1)
            values = torch.cat([values for _, values in taken])
            error = softmax_output(logits, values) - truth
            expected = error.square().sum(-1)
            torch.testing.assert_close(found[density, :, index], expected, rtol=1e-4, atol=1e-6)
            expected = (error * (mean - truth)).sum(-1)
            torch.testing.assert_close(towards[density, :, index], expected, rtol=1e-4, atol=1e-5)


def test_kept_keys_far_below_the_dropped_ones() -> None:
    """Their weight beside the pseudo-keys underflows; with pool weight 0 they are all there is."""
    kept = part(torch.full((1, 2), -500.0), torch.ones(2, 3))
    dropped = part(torch.zeros(1, 2), torch.full((2, 3), 7.0))
    found = errors([(kept, kept), (dropped, dropped)], [0.0, 1.0])
    torch.testing.assert_close(found[0, 0], torch.tensor([3 * 36.0, 0.0]))  # true: 7
    assert not found[1].any()


def test_rows_that_reach_no_key_give_zero() -> None:
    none = part(torch.zeros(1, 0), torch.zeros(0, 3))
    some = part(torch.zeros(1, 1), torch.full((1, 3), 2.0))
    found = errors([(none, none), (none, some)], [0.0, 1.0])  # true: 0
    assert found.squeeze(1).tolist() == [[0.0, 3 * 4.0], [0.0, 0.0]]
    assert not errors([(none, none), (none, none)], [0.0, 1.0]).any()


def test_distances_are_packed_and_read_back(generator: torch.Generator) -> None:
    def some(keys: int) -> Partial:
        logits = torch.randn(6, keys, generator=generator)
        return part(logits, torch.randn(keys, 4, generator=generator))

    found = bucket_distances([(some(5), some(2)) for _ in range(3)], torch.ones(4))
    packed = found.packed()
    assert packed.shape == (Distances.packed_fields(3), 6)
    unpacked = Distances.of_packed(packed)
    for each in fields(Distances):
        assert torch.equal(getattr(unpacked, each.name), getattr(found, each.name)), each.name


def test_small_errors_beside_large_values(generator: torch.Generator) -> None:
    """All values lie 100 times further from 0 than from each other, so that their products around
    0 would be wrong by 0.01."""

    def some() -> Partial:
        logits = torch.randn(6, 9, generator=generator)
        return part(logits, 100 + torch.randn(9, 4, generator=generator))

    parts = [(some(), part(*EMPTY)) for _ in range(3)]
    found = errors(parts, [0.0])
    double = [replace(exact, unnormalised=exact.unnormalised.double()) for exact, _ in parts]
    truth = reduce(Partial.plus, double).output()
    for density in range(2):
        kept = reduce(Partial.plus, double[: density + 1])
        expected = (kept.output() - truth).square().sum(-1)
        torch.testing.assert_close(found[density, :, 0], expected.float(), rtol=1e-3, atol=1e-5)


EMPTY = torch.zeros(6, 0), torch.zeros(0, 4)

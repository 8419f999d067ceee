# SPDX-License-Identifier: Apache-2.0
"""Choices for a few heads against all the settings there are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from sparge.tune import allocate
from sparge.tune.allocate import Hulls, HullSteps


def shared(errors: np.ndarray, costs: np.ndarray, densities: np.ndarray, mean: float) -> np.ndarray:
    return steps_of(errors, costs, densities).climb(mean)


def steps_of(errors: np.ndarray, costs: np.ndarray, densities: np.ndarray) -> HullSteps:
    """Of heads that count alike, worked out in two parts."""
    half = len(errors) // 2
    parts = [Hulls.of(part, costs) for part in (errors[:half], errors[half:]) if len(part)]
    return HullSteps.of(Hulls.joined(parts), np.ones(len(errors)), densities)


def meet_error(
    errors: np.ndarray, costs: np.ndarray, densities: np.ndarray, whole: np.ndarray, most: float
) -> np.ndarray:
    return allocate.meet_error(steps_of(errors, costs, densities), errors, costs, whole, most)


def least_error(errors: np.ndarray, costs: np.ndarray, total: float) -> float:
    every = np.array(list(product(range(errors.shape[1]), repeat=len(errors))))
    sums = errors[np.arange(len(errors)), every].sum(1)
    return float(sums[costs[every].sum(1) <= total + 1e-9].min())


@pytest.mark.parametrize("attempt", range(5))
def test_water_filling_leaves_the_least_error(seed: int, attempt: int) -> None:
    """No choice of all 6^4 is better at the densities that whole steps reach."""
    random = np.random.default_rng([seed, attempt])
    costs = random.permutation([0.05, 0.1, 0.2, 0.35, 0.6, 1.0])
    errors = random.random((4, 6)) * np.exp(-3 * costs)
    for mean in np.linspace(0.05, 1.0, 50):
        chosen = shared(errors, costs, costs, mean)
        assert costs[chosen].sum() <= mean * 4 + 1e-6
    on_hull = breakpoints(errors, costs)
    assert len(on_hull) > 3
    for total, summed in on_hull:
        chosen = shared(errors, costs, costs, total / 4)
        assert errors[np.arange(4), chosen].sum() == pytest.approx(summed)
        assert least_error(errors, costs, total) == pytest.approx(summed)


def breakpoints(errors: np.ndarray, costs: np.ndarray) -> list[tuple[float, float]]:
    """Total cost and error of the minima of error + price x cost, over all prices."""
    found = {}
    for price in np.geomspace(1e-3, 1e3, 4000):
        chosen = (errors + price * costs).argmin(1)
        found[round(float(costs[chosen].sum()), 9)] = float(
            errors[np.arange(len(errors)), chosen].sum()
        )
    return sorted(found.items())


def test_ties_go_to_the_lower_head_and_candidate() -> None:
    costs = np.array([0.1, 0.2, 0.2])
    errors = np.array([[0.5, 0.1, 0.1]] * 3)
    assert shared(errors, costs, costs, 0.1 + 0.1 / 3).tolist() == [1, 0, 0]
    assert meet_error(errors, costs, costs, errors, 1.1).tolist() == [1, 0, 0]


def test_cost_ranks_and_density_is_what_is_shared() -> None:
    """A residual costs time, but keeps no pairs."""
    costs, densities = np.array([0.1, 0.116, 0.2]), np.array([0.1, 0.1, 0.2])
    errors = np.array([[0.5, 0.2, 0.15]])
    assert shared(errors, costs, densities, 0.1).tolist() == [1]
    worthless = np.array([[0.5, 0.5, 0.1]])
    assert shared(worthless, costs, densities, 0.1).tolist() == [0]


def test_the_better_step_is_the_better_for_its_cost() -> None:
    """Room for one step: 0.4 less error for 0.116, residual included, or 0.38 less for 0.1."""
    costs, densities = np.array([0.1, 0.2, 0.216]), np.array([0.1, 0.2, 0.2])
    errors = np.array([[0.5, 0.5, 0.1], [0.5, 0.12, 0.12]])
    assert shared(errors, costs, densities, 0.15).tolist() == [0, 1]


def test_too_little_for_all_gives_the_cheapest() -> None:
    costs = np.array([0.1, 0.2])
    assert shared(np.array([[0.5, 0.1]] * 2), costs, costs, 0.01).tolist() == [0, 0]


def test_an_error_takes_the_least_density_that_leaves_it(seed: int) -> None:
    """It is one of the densities that water-filling stops at; between two of them the denser
    one.
    """
    random = np.random.default_rng(seed)
    costs = np.linspace(0.05, 1, 12)
    errors = random.random((40, 12)) * np.exp(-3 * costs)
    heads, before = np.arange(40), np.inf
    for mean in np.linspace(0.05, 1, 60):
        reached = shared(errors, costs, costs, mean)
        left = float(errors[heads, reached].sum())
        chosen = meet_error(errors, costs, costs, errors, left)
        assert errors[heads, chosen].sum() <= left * (1 + 1e-8)
        # What is left over goes to steps that fit there, out of their turn: these may take more.
        assert costs[chosen].sum() <= costs[reached].sum() + 2 * 0.95
        assert left <= before
        before = left


def test_whole_errors_say_when_it_is_enough() -> None:
    """The order of steps is that of what is dropped; rounding counts where they end."""
    costs = np.array([0.1, 0.2, 1.0])
    errors = np.array([[0.5, 0.3, 0.0], [0.4, 0.1, 0.0]])
    whole = np.hypot(errors, np.array([[0.2], [0.0]]))
    reached = [meet_error(errors, costs, costs, whole, most).tolist() for most in (1.0, 0.7, 0.5)]
    assert reached == [[0, 0], [0, 1], [1, 1]]
    assert meet_error(errors, costs, costs, whole, 0.1).tolist() == [2, 2], "it never does"


def test_hulls_are_those_of_each_head_walked_alone(seed: int) -> None:
    """Equal errors, falls and costs are among them."""
    random = np.random.default_rng(seed)
    costs = np.linspace(0.05, 1, 20)[random.integers(0, 20, 30)]
    errors = random.integers(0, 9, (50, 30)) / 8
    errors[:25] *= np.exp(-3 * costs)
    errors[random.random(errors.shape) < 0.2] = np.inf
    errors[:, 0] = 1.0
    steps = steps_of(errors, costs, costs)
    for head, error in enumerate(errors):
        assert steps.after[steps.head == head].tolist() == hull(error, costs)


def hull(error: np.ndarray, costs: np.ndarray) -> list[int]:
    """The candidates after the cheapest one."""
    order = [int(i) for i in np.lexsort((error, costs)) if np.isfinite(error[i])]
    first = {costs[i]: i for i in reversed(order)}
    left, found = [first[cost] for cost in sorted(first)], []
    at = left.pop(0)
    while falling := [i for i in left if error[i] < error[at]]:
        slopes = [(error[at] - error[i]) / (costs[i] - costs[at]) for i in falling]
        place = max(range(len(falling)), key=lambda i: (slopes[i], i))
        at, left = falling[place], falling[place + 1 :]
        found.append(at)
    return found


def test_steps_of_a_head_follow_each_other() -> None:
    """So do those of candidates on a line, and where some were not measured."""
    costs = np.linspace(0.05, 1, 20)
    errors = np.stack([1 - costs, np.where(costs < 0.3, np.inf, 1 / costs), 0.5 / costs, 0 * costs])
    steps = steps_of(errors, costs, costs)
    for head, first in enumerate(steps.cheapest):
        mine = steps.head == head
        at = [first, *steps.after[mine]]
        assert steps.before[mine].tolist() == at[:-1]
        assert np.isfinite(errors[head, at]).all()

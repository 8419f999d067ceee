# SPDX-License-Identifier: Apache-2.0
"""Random calls of the library against a float64 oracle that knows nothing of the reference.

A number makes a call (`tests.fuzz.draw`), the oracle its answer (`oracle`), the steps of the
roundings what it may be off by (`bounds`), and the rules of a policy which blocks it may keep
(`routing`). On the CPU the reference is judged twice, in plain arithmetic and in that of a Hopper
GPU. By environment variables:

    SPARGE_FUZZ_CASES=10000   so many calls; without it 600 on the CPU, each judged in two ways,
                              and 1,500 on a GPU
    SPARGE_FUZZ_SEED=1234     that call alone, as a failure names it
"""

from __future__ import annotations

import os
import statistics

import pytest

import sparge
from tests.fuzz.check import run
from tests.fuzz.draw import draw_case

CASES = {"cpu": 600, "cuda": 1500}
PARTS = 10


def seeds(device: str, part: int) -> range | list[int]:
    if "SPARGE_FUZZ_SEED" in os.environ:
        return [int(os.environ["SPARGE_FUZZ_SEED"])] if part == 0 else []
    cases = int(os.environ.get("SPARGE_FUZZ_CASES", CASES[device]))
    return range(part, cases, PARTS)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(device: str, part: int) -> None:
    """Every call gives what float64 gives, within its roundings."""
    assert sparge.capabilities(device).usable is (device == "cuda")
    faults, ratios = [], []
    for seed in seeds(device, part):
        case = draw_case(seed, device)
        outcome = run(case)
        if outcome.faults:
            faults.append(f"SPARGE_FUZZ_SEED={seed}, {case.way}: {'; '.join(outcome.faults)}")
        if outcome.ratio is not None:
            ratios.append(outcome.ratio)
    assert not faults, f"{len(faults)} calls are wrong:\n" + "\n".join(faults)
    if len(ratios) >= 20:
        # Errors that are far below the expected ones would show nothing.
        assert 0.1 < statistics.median(ratios) < 1.2

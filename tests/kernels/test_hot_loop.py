# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of the main loop on RTX GPUs: a turn of it is noticed.

Where it is meant, `python -m tests.kernels.sass` writes the figures anew.
"""

from __future__ import annotations

import json

import pytest

from sparge.kernels.spec import KernelSpec
from tests.kernels.sass import FIGURES, SPECS, counts_of, versions

ROWS = json.loads(FIGURES.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _same_compiler(compiler) -> None:
    try:
        found = versions()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    if found != ROWS["versions"]:
        pytest.skip(f"the figures are of {ROWS['versions']}, and this is {found}")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_instructions_of_the_hot_loop(spec: KernelSpec) -> None:
    assert counts_of(spec) == ROWS[spec.id]

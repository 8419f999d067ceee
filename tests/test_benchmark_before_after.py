# SPDX-License-Identifier: Apache-2.0
"""Two versions of the library in one process: loaded apart, their bits and times compared."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path

import pytest
import torch

import sparge
from benchmarks import before_after
from benchmarks.before_after import beside, compare, difference, load_version, overlaid
from benchmarks.shapes import Shape

GRID = sparge.TokenGrid(2, 8, 16)
TINY = Shape("tiny", 2, GRID.tokens, 64, GRID)


def test_an_overlay_is_a_version_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = tmp_path / "faster_route"
    overlay.mkdir()
    (overlay / "route.cu").write_text("// another")
    copied = overlaid(overlay, tmp_path / "versions")
    assert (copied / "csrc" / "route.cu").read_text() == "// another"
    assert (copied / "csrc" / "means.cu").is_file()
    other = load_version(copied)
    assert other.__name__ == "faster_route" and other.attention is not sparge.attention
    draw = before_after.draw
    monkeypatch.setattr(before_after, "draw", lambda shape: draw(shape, "cpu"))
    monkeypatch.setattr(before_after, "stage_ms", lambda work, calls, library: {"attend": 1.5})
    times = cycle([2.0, 4.0])  # this version is timed first in even rounds, the base in odd ones
    rows = list(compare([other, sparge], TINY, [0.5], 4, lambda work: next(times)))
    assert [row["way"] for row in rows] == list(before_after.WAYS)
    assert all(row["equal"] and row["attend_ms"] == 1.5 for row in rows)


def test_differences_are_of_bits_and_of_numbers() -> None:
    one = torch.tensor([1.0, math.inf, math.nan])
    assert difference(one, one.clone()) == (True, 0.0)
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])) == (False, 0.0)
    assert difference(torch.tensor([1.5]), torch.tensor([1.0])) == (False, 0.5)
    assert difference(torch.tensor([math.nan]), torch.tensor([1.0])) == (False, math.inf)
    found = {"base_ms": 2.0, "ms": 1.0, "gain": 1.0, "spread": 0.0}
    assert beside([2.0, 2.2, 2.0], [1.0, 1.1, 1.0]) == found

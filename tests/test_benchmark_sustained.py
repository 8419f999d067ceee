# SPDX-License-Identifier: Apache-2.0
"""Rows of launches in turns, with a clock that stands for the GPU's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import sustained
from benchmarks.kernel_variants import BASE
from benchmarks.sustained import Case, attend_launch, beside, measure, parsed, rows_of
from sparge.kernels import KernelSpec
from sparge.kernels.spec import HOPPER_ATTEND
from sparge.stages import launch


def test_a_case_says_shape_density_and_mode() -> None:
    assert Case.parse("wan480:.2:budgets").name == "wan480, ours, budgets, 20%"
    assert Case.parse("mochi:1") == Case("mochi", 1.0, "ours")
    for text in ("mars:1", "mochi:1:all"):
        with pytest.raises(ValueError, match=f"{text!r} is no case"):
            Case.parse(text)


def test_cases_have_commas_between_them() -> None:
    cases = [Case("mochi", 1.0, "ours"), Case("wan480", 0.2, "ours, budgets")]
    assert parsed("mochi:1,wan480:.2:budgets") == cases


def test_an_overlay_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    overlay = tmp_path / "deep" / "csrc"
    overlay.mkdir(parents=True)
    (overlay / f"{HOPPER_ATTEND}.cu").write_text("// another kernel\n", encoding="utf-8")
    options = argparse.Namespace(overlays=[overlay.parent])
    with pytest.raises(SystemExit, match="deep changes nothing"):
        next(rows_of(options, tmp_path / "copies"))


def test_gains_are_of_means_and_their_error_of_rounds() -> None:
    found = beside([2.0, 2.2], [1.0, 1.0])
    assert found == {"ms": 1.0, "rounds": [1.0, 1.0], "gain": 110.0, "error": 10.0}
    assert beside([2.0], [2.0])["error"] is None


class Kernel:
    """Counts launches."""

    def __init__(self) -> None:
        self.launches = 0

    def launch(self, *_: object) -> None:
        self.launches += 1


def test_attend_alone_is_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {entry: Kernel() for entry in ("quantize", HOPPER_ATTEND)}
    monkeypatch.setattr(launch, "get_kernel", lambda spec, _: kernels[spec.entry])

    def work() -> None:
        for entry in kernels:
            kernel: Any = launch.get_kernel(KernelSpec(entry, "sm_90a"), 0)
            kernel.launch("grid", "params")

    again = attend_launch(work)
    again()
    assert {entry: kernel.launches for entry, kernel in kernels.items()} == {
        "quantize": 1,
        HOPPER_ATTEND: 2,
    }


def test_variants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {BASE: 2.0, "quick": 1.0}
    rows: list[tuple[str, int]] = []

    class Two:
        @contextmanager
        def using(self, name: str) -> Iterator[None]:
            monkeypatch.setattr(sustained, "attend_launch", lambda _: name)
            yield

    def row_ms(name: Any, calls: int, look: Callable[[], None] | None = None) -> float:
        rows.append((name, calls))
        if look is not None:
            look()
        return took[name]

    monkeypatch.setattr(sustained, "draw", lambda _: ())
    monkeypatch.setattr(sustained, "modes", lambda *_: [_Mode("ours")])
    monkeypatch.setattr(sustained, "row_ms", row_ms)
    monkeypatch.setattr(sustained, "state", lambda: {"watts": 700.0, "mhz": 1600.0})
    monkeypatch.setattr(sustained, "WARM_UP_SECONDS", 0.0)
    variants: Any = Two()
    found = list(measure(variants, list(took), Case("mochi", 1.0, "ours"), 2, 0.02))
    assert [row["variant"] for row in found] == list(took)
    assert [row["gain"] for row in found] == [0.0, 100.0] and found[1]["watts"] == 700
    others = 3  # rows of a third, which are not timed: clocks of the variant before are not its own
    turns = (BASE, "quick", "quick", BASE)
    assert rows == [(BASE, 5), *((name, n) for name in turns for n in (others, 10))]


class _Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def attend(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a stand-in is launched instead")

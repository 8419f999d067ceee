# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/benchmarks.md and the README are those of benchmarks/results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import report, speed_plot, speed_table
from benchmarks.limits import DENSITIES, Ceilings, bound, read_ceilings
from benchmarks.png import write_png
from benchmarks.shapes import SHAPES
from benchmarks.speed_table import Speeds

MOST = Ceilings(1.5e15, 1.5e15, 7e14, 3.7e12, 3e13, 8e12, 4e12)


def timed(shape: str, peer: str, asked: float, ms: float, **more: Any) -> dict[str, Any]:
    named = {
        "shape": shape,
        "peer": peer,
        "asked_density": asked,
        "density": asked + 0.01 * (asked < 1),
    }
    flops = SHAPES[shape].flops() / ms / 1e9
    rates = {"dense_equivalent_tflops": flops, "executed_tflops": flops * named["density"]}
    return named | rates | {"ms": ms, "rel_l1": 0.002, **more}


def some_rows() -> list[dict[str, Any]]:
    rows = []
    for shape in ("mochi", "cogx2b", "hunyuan"):
        rows += [timed(shape, "torch cudnn", 1.0, 42.0), timed(shape, "torch flash", 1.0, 67.0)]
        rows += [timed(shape, "ours", density, 30.0 * density) for density in DENSITIES]
        pooled = {"pooled_heads": 0.5}
        rows += [timed(shape, "ours, budgets", d, 33.0 * d, **pooled) for d in DENSITIES]
        absent = {"shape": shape, "peer": "flash-attn-4", "asked_density": 1.0}
        rows.append(absent | {"absent": "it is not importable"})
    rows.append(timed("hunyuan", "comfy-kitchen sol_attn", 0.2, 18.8))
    return [row | {"gpu": "some GPU", "commit": "c1"} for row in rows]


def cells(text: str, first: str) -> list[list[str]]:
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:]] for line in lines if line[0].strip() == first]


def test_tables_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["report", "--check"])
    assert report.main() == 0, "run: python -m benchmarks.report"


def test_pictures_are_generated(tmp_path: Path) -> None:
    rows, most = report.read(report.SPEEDS), read_ceilings(report.RESULTS / report.LIMITS)
    found = speed_plot.pictures(rows, most)
    assert set(found) == set(speed_table.TITLES)
    for shape, pixels in found.items():
        name = speed_plot.picture_name(shape)
        # Another zlib packs other bytes, another torch rounds an edge differently.
        write_png(tmp_path / name, pixels)
        here, there = ((folder / name).stat().st_size for folder in (tmp_path, report.RESULTS))
        assert there == pytest.approx(here, rel=0.02), "run: python -m benchmarks.report"


def test_each_figure_says_where_it_was_measured() -> None:
    calls = (report.CALLS, report.AGAIN, report.OTHERS, report.RUNS, report.CALLS_H100)
    for name in (report.SPEEDS, report.SPEEDS_H100, report.ERRORS, *calls, "h200_memory.jsonl"):
        for row in report.read(name):
            assert row["gpu"] and row["commit"]


def test_hopper_errs_as_the_portable_kernel_does() -> None:
    """Rounding P and its sums alike gains on data with structure, fixed point loses on noise."""
    shapes = {row["shape"] for row in report.read(report.ERRORS)}
    assert shapes == set(speed_table.TITLES)
    for data, most in (("drift", 1.001), ("noise", 1.01)):
        found = report.errors_beside_portable(data)
        assert len(found) == len(shapes) * 2 * len(DENSITIES)
        assert max(found) <= most


def test_tables_hold_times_limits_and_shares() -> None:
    text = speed_table.tables(some_rows(), MOST)
    wanted = ["30.0", "15.0", "9.00", "6.00", "3.00", "0.0020 (dense)"]
    assert cells(text, "ours") == [wanted, wanted]
    assert cells(text, "torch flash")[0] == ["67.0", "", "", "", "", "0.0020 (dense)"]
    mochi, pooled = (bound(SHAPES["mochi"], 0.21, MOST, heads).total for heads in (0.0, 0.5))
    assert cells(text, "limit")[0][3] == f"{mochi:.2f}"
    assert cells(text, "limit / ours")[0][3] == f"{100 * mochi / 6:.0f} %"
    assert cells(text, "limit / ours, budgets")[0][3] == f"{100 * pooled / 6.6:.0f} %"
    executed = SHAPES["mochi"].flops(0.21) / 6.6e-3 / 1e15
    assert (
        cells(text, "PFLOP/s of kept pairs, ours, budgets, whole call")[0][3] == f"{executed:.2f}"
    )


def test_an_error_names_the_density_that_it_is_of() -> None:
    rows = [
        timed("mochi", "ours", d, 30 * d, rel_l1=e) for d, e in ((1, 0.002), (0.3, 0.4), (0.1, 0.3))
    ]
    assert cells(speed_table.tables(rows, None), "ours")[0][-1] == "0.4000 (30 %)"


def test_executed_rates_are_beside_our_dense_one() -> None:
    def at(peer: str, asked: float, attend: float, **more: Any) -> dict[str, Any]:
        return timed("mochi", peer, asked, attend + 0.5, before_attend_ms=0.5, **more)

    pooled = {"pooled_heads": 0.5}
    rows = [at("ours", 1.0, 20.0), at("ours", 0.2, 5.0), at("ours, budgets", 0.2, 5.0, **pooled)]
    rows.append(at("ours, budgets", 1.0, 25.0, **pooled))
    text = speed_table.tables(rows, None)
    plain, budgets = (
        cells(text, f"executed rate of attend, {peer} / ours dense")[0]
        for peer in ("ours", "ours, budgets")
    )
    assert plain == ["100 %", "", "", "84 %", "", ""]
    # 700 key blocks have a pseudo-key each, in half of the heads.
    assert budgets == ["80 %", "", "", f"{100 * 4 * (0.21 + 350 / 44776):.0f} %", "", ""]
    assert budgets[3] == "87 %"
    assert "executed rate" not in speed_table.tables(some_rows(), None), "without stages"


def test_what_is_said_of_flux_holds() -> None:
    rows = [row for row in report.read(report.SPEEDS) if row["shape"] == "flux1k"]
    budgets = {r["asked_density"]: r for r in rows if r["peer"] == "ours, budgets"}
    assert budgets[0.2]["density"] == budgets[0.1]["density"]
    sparse = [row for row in rows if "stages" in row and row["asked_density"] < 1]
    assert all(row["ms"] == pytest.approx(sum(row["stages"].values()), rel=0.1) for row in sparse)


def test_no_run_of_a_user_is_slower_than_the_default() -> None:
    """But for what one second run differs from the next."""
    runs = {(r["model"], len(r["seconds"]), r["config"]): r for r in report.read(report.RUNS)}
    assert {steps for _, steps, _ in runs} == {12, 20}
    for (model, steps, config), row in runs.items():
        assert row["run_seconds"] <= 1.005 * runs[model, steps, report.CONFIGS[0]]["run_seconds"]
        if config == report.CONFIGS[-1]:
            assert row["sparse_calls"] > 0 or "too few steps" in row["report"]


def test_what_comes_before_attend_is_in_microseconds() -> None:
    rows = [*some_rows(), timed("mochi", "ours", 0.2, 5.0, before_attend_ms=0.5474)]
    text = speed_table.tables(rows, None)
    assert cells(text, "means, quantize and route of ours")[0] == ["", "", "", "0.547", "", ""]
    assert "means, quantize and route of ours, budgets" not in text


def test_who_was_not_measured_is_named() -> None:
    rows = some_rows()
    assert "Not measured: flash-attn-4: it is not importable." in speed_table.tables(rows, MOST)
    late = {"shape": "mochi", "peer": "sol_attn", "asked_density": 0.1, "absent": "no time"}
    assert speed_table.absent([*rows, late, late])[1:] == ["sol_attn: no time (mochi)"]
    partly = late | {"peer": "ours"}
    assert speed_table.absent([*rows, partly, partly])[1:] == ["ours: no time (mochi 10 %)"]


def test_other_shapes_share_a_table() -> None:
    text = speed_table.tables(some_rows(), MOST)
    (found,) = cells(text, "hunyuan: 24 x 128, 119,056 tokens")
    assert found[:4] == ["42.0 (torch cudnn)", "18.8", "33.0", "16.5"]
    assert found[7] == f"{SHAPES['hunyuan'].flops() / 6.6e-3 / 1e15:.2f}"
    assert found[8].endswith(" %")


def test_without_limits_the_tables_have_none() -> None:
    text = speed_table.tables(some_rows(), None)
    assert "| limit |" not in text and cells(text, "ours")


def test_lines_of_a_picture() -> None:
    lines = speed_plot.lines(Speeds.of(some_rows(), "mochi"), MOST)
    assert list(lines) == ["cudnn", "ours", "limit"], "the fastest dense peer, no sparse one"
    assert {ms for _, ms in lines["cudnn"].points} == {42.0}
    assert lines["ours"].points[0] == (10.0, pytest.approx(3.3)), "with budgets"
    plain = [row for row in some_rows() if "budgets" not in row["peer"]]
    assert speed_plot.lines(Speeds.of(plain, "mochi"), None)["ours"].points[0] == (10.0, 3.0)


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(2.1, 42.0, (2, 5, 10, 20, 50)), (0.3, 0.3, (0.2, 0.5)), (1.0, 10.0, (1, 2, 5, 10))],
)
def test_ticks_hold_all_values(low: float, high: float, wanted: tuple[float, ...]) -> None:
    assert speed_plot.ticks(low, high) == pytest.approx(wanted)


def test_pictures_show_every_line() -> None:
    pictures = speed_plot.pictures(some_rows(), MOST)
    assert list(pictures) == ["mochi", "cogx2b"]
    for pixels in pictures.values():
        seen = {tuple(colour) for colour in torch.unique(pixels.flatten(0, 1), dim=0).tolist()}
        assert {speed_plot.ORANGE, speed_plot.BLUE, speed_plot.BLACK} <= seen

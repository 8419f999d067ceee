# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/benchmarks.md and the README are those of benchmarks/results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import pictures, report, speed_table
from benchmarks.limits import limit_ms
from benchmarks.quality.rows import EMULATION, REFERENCE, Row, write
from benchmarks.quality.rows import read as read_quality
from benchmarks.quality.section import PARTS, chosen, part_table, targets_table
from benchmarks.shapes import SHAPES
from benchmarks.speed_table import DENSITIES, Speeds

GPU = "some GPU"
RATES = report.LIMITS


def timed(shape: str, peer: str, asked: float, ms: float, **more: Any) -> dict[str, Any]:
    density = asked + 0.01 * (asked < 1)
    named = {"shape": shape, "peer": peer, "asked_density": asked, "density": density}
    flops = SHAPES[shape].flops() / ms / 1e9
    rates = {"dense_equivalent_tflops": flops, "executed_tflops": flops * named["density"]}
    return named | rates | {"ms": ms, "rel_l1": 0.002, **more}


def cells(text: str, first: str) -> list[list[str]]:
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:]] for line in lines if line[0].strip() == first]


def test_tables_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["report", "--check"])
    assert report.main() == 0, "run: python -m benchmarks.report"
    pages = "".join(path.read_text(encoding="utf-8") for path in report.PAGES)
    assert all(f"<!-- {name}:begin -->" in pages for name in report.TABLES)
    assert report.written("<!-- calls:begin -->\nold\n<!-- calls:end -->") == (
        f"<!-- calls:begin -->\n{report.calls_table()}<!-- calls:end -->"
    )


def test_pictures_are_drawn(tmp_path: Path) -> None:
    report.draw(tmp_path)
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == sorted(path.name for path in report.RESULTS.glob("*.png"))


def test_tables_hold_times_limits_and_shares() -> None:
    rows = [timed("mochi", "torch cudnn", 1.0, 42.0), timed("mochi", "torch flash", 1.0, 67.0)]
    rows += [timed("mochi", "ours", density, 30.0 * density) for density in DENSITIES]
    pooled = {"pooled_heads": 0.5}
    rows += [timed("mochi", "ours, budgets", d, 33.0 * d, **pooled) for d in DENSITIES]
    speeds = Speeds.of(rows, "mochi")
    text = speed_table.shape_table(speeds, RATES)
    assert cells(text, "ours") == [["30.0", "15.0", "9.00", "6.00", "3.00", "0.0020 (dense)"]]
    assert cells(text, "torch flash")[0] == ["67.0", "", "", "", "", "0.0020 (dense)"]
    plain, with_pools = (limit_ms(SHAPES["mochi"], 0.21, RATES, heads) for heads in (0.0, 0.5))
    assert cells(text, "limit")[0][3] == f"{plain:.2f}"
    assert cells(text, "limit / ours, budgets")[0][3] == f"{100 * with_pools / 6.6:.0f} %"
    executed = SHAPES["mochi"].flops(0.21) / 6.6e-3 / 1e15
    (found,) = cells(text, "PFLOP/s of kept pairs, ours, budgets, whole call")
    assert found[3] == f"{executed:.2f}" and "executed rate" not in text, "without stages"
    lines = pictures.speed_lines(speeds, RATES)
    assert list(lines) == ["cudnn", "ours", "limit"], "the fastest dense peer, no sparse one"
    assert {ms for _, ms in lines["cudnn"]} == {42.0}
    assert lines["ours"][0] == (10.0, pytest.approx(3.3)), "with head settings"


def test_executed_rates_are_beside_our_dense_one() -> None:
    def at(peer: str, asked: float, attend: float, **more: Any) -> dict[str, Any]:
        return timed("mochi", peer, asked, attend + 0.5, before_attend_ms=0.5, **more)

    pooled = {"pooled_heads": 0.5}
    rows = [at("ours", 1.0, 20.0), at("ours", 0.2, 5.0), at("ours, budgets", 0.2, 5.0, **pooled)]
    text = speed_table.shape_table(Speeds.of(rows, "mochi"), RATES)
    name = "executed rate of attend, ours{} / ours dense"
    assert cells(text, name.format(""))[0] == ["100 %", "", "", "84 %", "", ""]
    # 700 key blocks have a pseudo-key each, in half of the heads.
    assert cells(text, name.format(", budgets"))[0][3] == f"{400 * (0.21 + 350 / 44776):.0f} %"


def quality(data: str, mode: str, density: float, where: str, **fields: float) -> Row:
    named = {"data": data, "mode": mode, "asked_density": density, "where": where}
    return named | {"density": density + 0.004, "commit": "c1"} | fields


ROWS = [
    quality("dino some film", "drop", 0.2, EMULATION, rel_l2=0.21, layers=12),
    quality("dino some film", "drop", 0.2, GPU, rel_l2=0.2087, layers=12),
    quality("dino some film", "sol", 0.2, EMULATION, rel_l2=0.128, layers=12),
    quality("dit clips 0-5", "drop", 0.2, GPU, psnr=27.44),
    quality("dit clips 0-5", "drop", 0.9, GPU, psnr=42.2),
    quality("dit clips 0-1 5x10x9", "drop", 0.2, REFERENCE, psnr=1.0),
]


def test_tables_of_quality_hold_their_figures() -> None:
    dino, clips = PARTS["quality-dino"], PARTS["quality-dit"]
    text = part_table(ROWS, dino)
    assert (cells(text, "drop"), cells(text, "sol")) == ([["0.209"]], [["0.128"]])
    assert text.endswith("some GPU: drop; emulation: sol; commit c1.\n")
    assert cells(part_table(ROWS, clips), "drop") == [["27.4", "42.2"]], "of full size"
    fewer = quality("dino some film", "drop", 0.1, GPU, rel_l2=0.3, layers=6)
    with pytest.raises(ValueError, match="different layers"):
        part_table([*ROWS, fewer], dino)
    later = [quality("dino clip 3", "drop", 0.1, GPU, rel_l2=0.5)]
    assert chosen([*ROWS, *later], dino) == later, "the data that came last"
    drawn = pictures.quality_lines(chosen(ROWS, clips), "psnr")
    assert drawn == {"drop": [(pytest.approx(20.4), 27.44)]}, "90 % is beyond the axis"


def test_targets_have_a_table(tmp_path: Path) -> None:
    shares = {"psnr": 35.04, "heads_within": 0.92, "mean_error": 0.0312, "worst_mean_error": 0.04}
    named = {"data": "dit clips 0-3", "mode": "ours auto quality", "density": 0.25, "commit": "c3"}
    row = named | shares | {"target": 0.03, "where": GPU, "no_worse_than_drop": 1.0}
    text = targets_table([*ROWS, row | {"where": EMULATION, "psnr": 9.0}, row])
    assert cells(text, "high") == [["0.03", "25 %", "35.0", "0.031 (0.040)", "92 %", "100 %"]]
    assert chosen([*ROWS, row], PARTS["quality-dit"]) == chosen(ROWS, PARTS["quality-dit"])
    path = tmp_path / "deep" / "rows.json"
    write(path, [row | {"psnr": 1 / 3}, ROWS[0]])
    write(path, [row | {"psnr": 2.0}])
    assert [found.get("psnr") for found in read_quality(path)] == [2.0, None], "a row gives way"
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(path, [row | {"psnr": float("nan")}])

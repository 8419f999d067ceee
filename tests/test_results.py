# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/benchmarks.md and the README are those of benchmarks/results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.quality.rows import EMULATION, Row, read, write
from benchmarks.quality.section import PARTS, chosen, part_table


def test_tables_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["report", "--check"])
    assert report.main() == 0, "run: python -m benchmarks.report"
    pages = "".join(path.read_text(encoding="utf-8") for path in report.PAGES)
    assert all(f"<!-- {name}:begin -->" in pages for name in report.TABLES)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    report.draw(tmp_path)
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == sorted(path.name for path in report.RESULTS.glob("*.png"))


def test_what_is_said_of_flux_holds() -> None:
    rows = [row for row in report.read(report.SPEEDS) if row["shape"] == "flux1k"]
    budgets = {r["asked_density"]: r for r in rows if r["peer"] == "ours, budgets"}
    assert budgets[0.2]["density"] == budgets[0.1]["density"]
    sparse = [row for row in rows if "stages" in row and row["asked_density"] < 1]
    assert all(row["ms"] == pytest.approx(sum(row["stages"].values()), rel=0.1) for row in sparse)


def quality(data: str, mode: str, where: str, density: float = 0.2, **fields: float) -> Row:
    named = {"data": data, "mode": mode, "asked_density": density, "where": where}
    return named | {"density": density + 0.004, "commit": "c1"} | fields


def test_rows_of_quality_give_way_to_a_gpus_and_to_later_ones(tmp_path: Path) -> None:
    gpu, dino = "some GPU", PARTS["quality-dino"]
    emulated = quality("dino some film", "drop", EMULATION, rel_l2=0.21, layers=12)
    rows = [
        emulated,
        quality("dino some film", "drop", gpu, rel_l2=0.2087, layers=12),
        quality("dino some film", "sol", EMULATION, rel_l2=0.128, layers=12),
    ]
    text = part_table(rows, dino)
    assert "| 0.209 |" in text and "| 0.128 |" in text and "| 0.210 |" not in text
    assert text.endswith("some GPU: drop; emulation: sol; commit c1.\n")
    fewer = quality("dino some film", "drop", gpu, 0.1, rel_l2=0.3, layers=6)
    with pytest.raises(ValueError, match="different layers"):
        part_table([*rows, fewer], dino)
    later = [quality("dino clip 3", "drop", gpu, 0.1, rel_l2=0.5)]
    assert chosen([*rows, *later], dino) == later, "the data that came last"
    path = tmp_path / "deep" / "rows.json"
    for value in (0.21, 0.2):
        write(path, [emulated | {"rel_l2": value}])
    assert [row["rel_l2"] for row in read(path)] == [0.2]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(path, [emulated | {"rel_l2": float("nan")}])

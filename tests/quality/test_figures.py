# SPDX-License-Identifier: Apache-2.0
"""The figures: lines where the numbers are, letters that can be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.quality import chart, figures
from benchmarks.quality.chart import Axis, Line, draw
from benchmarks.quality.rows import EMULATION, Row, write
from sparge.common import glyphs


def test_places_on_an_axis() -> None:
    assert Axis("density", (0, 10, 50)).place(20) == pytest.approx(0.4)
    assert Axis("error", (0.01, 0.1, 1), logarithmic=True).place(0.1) == pytest.approx(0.5)


def test_a_line_goes_through_its_points() -> None:
    colour = (213, 94, 0)
    picture = draw(
        "data",
        Axis("density", (0, 100)),
        Axis("error", (0, 1)),
        {"drop": Line([(25, 1.0), (75, 0.5)], colour)},
    )
    assert picture.shape == (chart.HEIGHT, chart.WIDTH, 3)
    width = chart.WIDTH - chart.LEFT - chart.RIGHT
    height = chart.HEIGHT - chart.TOP - chart.BOTTOM
    for x, y in ((0.25, 0.0), (0.5, 0.25), (0.75, 0.5)):
        pixel = picture[int(chart.TOP + y * height), int(chart.LEFT + x * width)]
        assert pixel.tolist() == list(colour)
    off = picture[int(chart.TOP + 0.4 * height), int(chart.LEFT + 0.5 * width)]
    assert off.tolist() == [255, 255, 255]


def test_every_glyph_differs_and_has_its_size() -> None:
    seen = {tuple(points.flatten().tolist()) for points in glyphs.GLYPHS.values()}
    assert len(seen) == len(glyphs.GLYPHS) >= 26 + 10 + 5
    assert all(p.shape == (glyphs.HEIGHT, glyphs.WIDTH) for p in glyphs.GLYPHS.values())
    assert glyphs.write("t")[0].all() and not glyphs.write("t")[1, 0]
    assert glyphs.write("ab", zoom=2).shape == (14, 22)
    assert not glyphs.write("~").any() and not glyphs.write("").any()
    assert torch.equal(glyphs.write("a_b"), glyphs.write("a b"))


def row(data: str, mode: str, density: float, where: str = EMULATION, **fields: float) -> Row:
    named = {"data": data, "mode": mode, "asked_density": density, "where": where}
    return named | {"density": density} | fields


def test_two_pictures_from_the_rows(tmp_path: Path) -> None:
    rows = [
        made
        for mode, error in (("drop", 0.3), ("ours auto", 0.06))
        for density in (0.1, 0.3, 0.9)
        for made in (
            row("calls", mode, density, rel_l2=error / (1 + density), psnr=50.0),
            row("clips", mode, density, psnr=30 + 20 * density),
        )
    ]
    write(tmp_path / "rows.json", rows)
    results = ["--results", str(tmp_path / "rows.json")]
    wanted = [*results, "--out", str(tmp_path / "out")]
    figures.main([*wanted, "--error", "calls", "--psnr", "clips"])
    for name in ("quality_rel_l2.png", "quality_psnr.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    for wrong in (wanted, [*wanted, "--psnr", "other"], [*results, "--psnr", "clips"]):
        with pytest.raises(SystemExit):
            figures.main(wrong)
    points = figures.lines((row for row in rows if row["data"] == "clips"), "psnr")["drop"].points
    assert points == [(10.0, 32.0), (30.0, 36.0)], "90 % is beyond the last tick"


def test_kernels_go_before_the_emulation() -> None:
    rows = [
        row("clips", "drop", 0.1, "a GPU", psnr=31.0),
        row("clips", "drop", 0.1, psnr=30.0),
        row("clips", "drop", 0.3, psnr=35.0),
    ]
    assert figures.lines(rows, "psnr")["drop"].points == [(10.0, 31.0), (30.0, 35.0)]


def test_a_value_gets_ticks_on_both_sides() -> None:
    line = Line([(10, 0.03), (20, 0.15)], (0, 0, 0))
    ticks = figures._around([line], figures.ERROR_TICKS)
    assert ticks == (0.02, 0.05, 0.1, 0.2)
    assert torch.tensor(ticks).diff().min() > 0

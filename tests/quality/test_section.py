# SPDX-License-Identifier: Apache-2.0
"""The section on quality of docs/benchmarks.md is made from the results file alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.png import write_png
from benchmarks.quality import figures
from benchmarks.quality.rows import EMULATION, REFERENCE, RESULTS, Row, read, write
from benchmarks.quality.section import BEGIN, END, PARTS, chosen, section

GPU = "some GPU"
CALLS, CLIPS, COMFYUI, *OTHER_MODELS = PARTS


def row(
    data: str, mode: str, density: float, where: str, commit: str = "c1", **fields: float
) -> Row:
    named = {"data": data, "mode": mode, "asked_density": density, "where": where}
    return named | {"density": density + 0.004, "commit": commit} | fields


#: As `benchmarks.quality --data dino`, `--data dit` and `comfyui_clip` write them on a GPU.
ROWS = [
    row("dino some film", "drop", 0.2, EMULATION, rel_l2=0.21, layers=12, psnr=30.0),
    row("dino some film", "drop", 0.2, GPU, rel_l2=0.2087, layers=12, psnr=30.1),
    row("dino some film", "sol", 0.2, EMULATION, rel_l2=0.128, layers=12, psnr=33.0),
    row("dino some film", "ours auto", 0.2, GPU, rel_l2=0.0449, layers=12, psnr=41.0),
    row("dit scene 0", "ours auto", 0.2, GPU, rel_l2=0.3, psnr=20.0),
    row("dit clips 0-5", "sol", 0.2, EMULATION, psnr=20.61, worst_psnr=18.0),
    row("dit clips 0-5", "drop", 0.2, GPU, psnr=27.44, worst_psnr=25.0),
    row("dit clips 0-5", "drop", 0.5, GPU, psnr=32.2, worst_psnr=25.0),
    row("dit clips 0-5", "ours auto", 0.2, GPU, "c2", psnr=31.36, worst_psnr=29.0),
    row("dit clips 0-1 5x10x9", "drop", 0.2, REFERENCE, psnr=1.0, worst_psnr=1.0),
    row("dit comfyui clips 0-3", "drop", 0.2, GPU, psnr=27.5, worst_psnr=25.0),
]


def cells(text: str, mode: str) -> list[list[str]]:
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:]] for line in lines if line[0].strip() == mode]


def test_the_page_holds_what_the_rows_say(tmp_path: Path) -> None:
    rows = read(RESULTS)
    text = figures.PAGE.read_text(encoding="utf-8")
    assert figures.page(rows) == text, "run: python -m benchmarks.quality.figures"
    for name, pixels in figures.shown(rows).items():
        # Another zlib packs other bytes, another torch rounds an edge differently.
        write_png(tmp_path / name, pixels)
        here, there = ((folder / name).stat().st_size for folder in (tmp_path, RESULTS.parent))
        assert there == pytest.approx(here, rel=0.02), "run: python -m benchmarks.quality.figures"


def test_without_rows_the_section_says_so() -> None:
    assert "Not measured yet" in section([])
    assert "Not measured yet" in section([row("dit clips 0-0 5x10x9", "drop", 0.2, GPU, psnr=1.0)])


def test_each_table_holds_its_figures() -> None:
    text = section(ROWS)
    assert cells(text, "drop") == [["0.209"], ["27.4", "32.2"], ["27.5"]]
    assert cells(text, "sol") == [["0.128"], ["20.6", ""]]
    assert cells(text, "ours auto") == [["0.045"], ["31.4", ""]]
    assert not cells(text, "ours manual")
    assert "some GPU: drop, ours auto; emulation: sol; commit c1)" in text
    assert "commit c1, c2)" in text, "of the clips"
    assert text.count("](../benchmarks/results/quality_") == 2
    assert "scene 0" not in text and "5x10x9" not in text


def test_layers_are_counted_and_not_mixed() -> None:
    assert "6 heads of all 12 layers" in section(ROWS)
    fewer = row("dino some film", "drop", 0.1, GPU, rel_l2=0.3, layers=6)
    with pytest.raises(ValueError, match=r"\[6, 12\] layers"):
        section([*ROWS, fewer])


def test_the_data_that_came_last_are_shown() -> None:
    later = [row("dino clip 3", "drop", 0.1, GPU, rel_l2=0.5)]
    assert chosen([*ROWS, *later], CALLS) == later
    assert {found["data"] for found in chosen(ROWS, CLIPS)} == {"dit clips 0-5"}


def of_target(target: float, where: str = GPU, **fields: float) -> Row:
    shares = {"density": 0.25, "psnr": 35.04, "heads_within": 0.92, "mean_error": 0.0312}
    named = {"data": "dit clips 0-3", "mode": "ours auto quality", "target": target}
    shares |= {"no_worse_than_drop": 1.0, "worst_mean_error": 0.04}
    return named | {"where": where} | shares | fields | {"commit": "c3"}


def test_the_targets_that_were_measured_have_a_table() -> None:
    rows = [*ROWS, of_target(0.1, psnr=30.0), of_target(0.03), of_target(0.05)]
    text = section([*rows, of_target(0.03, EMULATION, psnr=9.0)])
    assert cells(text, "high") == [["0.03", "25 %", "35.0", "0.031 (0.040)", "92 %", "100 %"]]
    assert cells(text, "fast") == [["0.1", "25 %", "30.0", "0.031 (0.040)", "92 %", "100 %"]]
    assert not cells(text, "balanced"), "not measured"
    assert text.count("auto quality on such clips") == 1 and "(some GPU, commit c3)" in text
    assert "auto quality on" not in section(ROWS)
    assert "Not measured yet" not in section([of_target(0.06)])


def test_rows_of_targets_are_no_rows_of_densities() -> None:
    rows = [*ROWS, of_target(0.03) | {"data": "dit clips 4-7"}]
    assert chosen(rows, CLIPS) == chosen(ROWS, CLIPS)
    assert figures.lines(rows, "psnr") == figures.lines(ROWS, "psnr")
    for name, pixels in figures.shown(rows).items():
        assert torch.equal(pixels, figures.shown(ROWS)[name])


def test_a_target_has_a_row_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write(path, [of_target(0.03, psnr=1.0), of_target(0.06), ROWS[0]])
    write(path, [of_target(0.03, psnr=2.0)])
    assert [(row.get("target"), row["psnr"]) for row in read(path)] == [
        (0.03, 2.0),
        (0.06, 35.04),
        (None, 30.0),
    ]


def test_section_and_pictures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, results = tmp_path / "benchmarks.md", tmp_path / "rows.json"
    page.write_text(f"before\n{BEGIN}old\n{END}\nafter\n", encoding="utf-8")
    write(results, ROWS)
    monkeypatch.setattr(figures, "PAGE", page)
    monkeypatch.setattr(figures, "RESULTS", results)
    figures.main(["--results", str(results)])
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}") and text.endswith(f"{END}\nafter\n")
    assert section(ROWS) in text and "old" not in text
    assert figures.page(ROWS) == text, "once is enough"
    shown = figures.shown(ROWS)
    assert list(shown) == [CALLS.picture, CLIPS.picture] and not COMFYUI.picture
    for name, pixels in shown.items():
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert len(torch.unique(pixels.flatten(0, 1), dim=0)) > 4


def test_other_models_have_tables_of_their_own() -> None:
    others = [
        row(f"{part.begins}0-3", "drop", 0.2, GPU, psnr=25.0 + index)
        for index, part in enumerate(OTHER_MODELS)
    ]
    text = section([*ROWS, *others])
    assert len(OTHER_MODELS) == 4
    of_others = [["25.0"], ["26.0"], ["27.0"], ["28.0"]]
    assert cells(text, "drop") == [*cells(section(ROWS), "drop"), *of_others]

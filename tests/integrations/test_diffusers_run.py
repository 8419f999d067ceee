# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole runs in pipelines of diffusers, with little models on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("diffusers", reason="needs diffusers (requirements-dev.txt)")

from benchmarks import diffusers_run


@pytest.mark.usefixtures("reference_allowed")
def test_each_model_runs_and_its_row_says_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    short = ["--steps", "4", "--native-steps", "2", "--topk", "0.4", "--mochi-frames", "25"]
    diffusers_run.main(["--tiny", "--device", "cpu", "--flash", *short, "--out", str(rows)])
    found = [json.loads(line) for line in rows.read_text("utf-8").splitlines()]
    assert [row["model"] for row in found] == list(diffusers_run.MODELS)
    for row in found:
        assert row["ratio"] == pytest.approx(row["native_seconds"] / row["second_seconds"])
        assert (row["sparse"], row["dense"]) == (6, 2), "of four steps the first is dense"
        assert row["density"] == pytest.approx(0.4, abs=0.05) and row["finite"]
        assert row["flash"] and not row["compiled"]
        assert row["gpu"] == "cpu" and "calls were sparse" in row["line"]
    assert capsys.readouterr().out.count("times as fast") == len(found)

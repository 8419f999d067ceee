# SPDX-License-Identifier: Apache-2.0
"""The fit finds the rates that made the times, and leaves those of calls alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import crossover_fit, sample_cost
from benchmarks.shapes import SHAPES
from benchmarks.timing import ROOT, read_rows, write_rows
from sparge.speed.sample_cost import SampleRates
from sparge.speed.worth import RATES_FILE, Rates

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*_samples.jsonl"))
HOST = SampleRates(once=2e-3, launch=1e-3, token=3e-9)
MADE = SampleRates(once=3e-4, launch=2e-4, token=1e-9, host=HOST)


def made_rows(head_dim: int = 128) -> list[dict[str, Any]]:
    return [
        {
            "gpu": "NVIDIA H200",
            "tokens": shape.tokens,
            "heads": shape.heads,
            "head_dim": head_dim,
            "walks": walks,
            "calls": calls,
            "ms": 1000 * MADE.seconds(shape.heads * shape.tokens, walks, calls),
            "host_ms": 1000 * HOST.seconds(shape.heads * shape.tokens, walks),
        }
        for shape in SHAPES.values()
        for walks, calls in sample_cost.CASES
    ]


def assert_made(found: SampleRates | None) -> None:
    assert found is not None and found.host is not None
    for rates, made in ((found, MADE), (found.host, HOST)):
        of_both = [(each.once, each.launch, each.token) for each in (rates, made)]
        assert of_both[0] == pytest.approx(of_both[1], rel=0.01)


def test_the_fit_finds_the_rates_that_made_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    rows = made_rows()
    (found,) = sample_cost.fit(rows).values()
    assert_made(SampleRates.read(found))
    bare = [{key: row[key] for key in row if key != "calls"} for row in rows if row["calls"] == 1]
    assert sample_cost.fit(bare) == {"128": found}
    sample_cost.show(rows)
    assert "twice the query blocks cost 0.50 more" in capsys.readouterr().out


def test_rates_of_calls_and_of_samples_leave_each_other_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates, out = tmp_path / "rates.json", tmp_path / "rows.jsonl"
    before = json.loads(RATES_FILE.read_text(encoding="utf-8"))
    rates.write_text(json.dumps(before), encoding="utf-8")
    for module in (sample_cost, crossover_fit):
        monkeypatch.setattr(module, "RATES_FILE", rates)
    write_rows(out, [*made_rows(64), *made_rows(128)])
    monkeypatch.setattr("sys.argv", ["sample_cost", "--fit", str(out)])
    sample_cost.main()
    crossover_fit.write(read_rows(ROOT / "benchmarks" / "results" / "h200_crossover.jsonl"))
    after = json.loads(rates.read_text(encoding="utf-8"))
    for head_dim, fields in after["NVIDIA H200"]["head_dims"].items():
        kept = Rates.read(before["NVIDIA H200"]["head_dims"][head_dim])
        found = Rates.read(fields)
        assert_made(found.sample)
        assert vars(found.sparse) == pytest.approx(vars(kept.sparse), rel=0.01)


def test_a_tiny_run_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sample_cost, "TINY", sample_cost.TINY[:1])
    monkeypatch.setattr(sample_cost, "CASES", ((1, 1),))
    monkeypatch.setattr(sample_cost, "FEWEST", 1)
    arguments = ["--tiny", "--commit", "c1", "--seconds", "0.1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["sample_cost", *arguments])
    sample_cost.main()
    (row,) = read_rows(out)[:1]
    assert row["ms"] > 0 and row["commit"] == "c1" and row["tokens"] == 256


def test_the_rates_are_those_of_the_results() -> None:
    kinds = json.loads(RATES_FILE.read_text(encoding="utf-8"))
    for rows in map(read_rows, RESULTS):
        known = kinds.pop(rows[0]["gpu"])["head_dims"]
        for head_dim, found in sample_cost.fit(rows).items():
            of_gpu = known[head_dim]["sample"]
            assert of_gpu.pop("host") == pytest.approx(found.pop("host"), rel=0.01)
            assert of_gpu == pytest.approx(found, rel=0.01)
    assert not kinds, "rates that no results stand behind"

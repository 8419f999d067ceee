# SPDX-License-Identifier: Apache-2.0
"""The benchmark of attention that several GPUs share, with a little shape on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import two_gpus, two_gpus_diffusers


def test_rows_say_what_two_ranks_did(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    little = ["--tiny", "--device", "cpu", "--shapes", "flux1k", "--repeats", "1"]
    two_gpus.main([*little, "--topk", "0.3", "--out", str(rows)])
    found = [json.loads(line) for line in rows.read_text("utf-8").splitlines()]
    assert [row["way"] for row in found] == two_gpus.ways([0.3])
    for row in found:
        assert row["ratio"] == pytest.approx(row["one_ms"] / row["two_ms"])
        assert row["all_to_all_share"] == pytest.approx(row["all_to_all_ms"] / row["two_ms"])
        assert len(row["attention_ms_of_ranks"]) == row["ranks"] == 2
        assert row["same_bits"] and row["rel_l2"] == 0, row["way"]
    by_way = {row["way"]: row for row in found}
    spread, dealt = by_way[two_gpus.SPREAD], by_way[two_gpus.DEALT]
    assert spread["most_work_to_mean"] > 1.5 > 1.3 > dealt["most_work_to_mean"]
    assert spread["density_of_ranks"][1] > 1.1 * spread["density_of_ranks"][0]


def test_rows_say_what_two_ranks_did_in_diffusers(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="needs diffusers (requirements-dev.txt)")
    rows = tmp_path / "rows.jsonl"
    little = ["--tiny", "--device", "cpu", "--models", "wan", "--layers", "2", "--repeats", "1"]
    two_gpus_diffusers.main([*little, "--topk", "0.3", "--out", str(rows)])
    found = [json.loads(line) for line in rows.read_text("utf-8").splitlines()]
    assert [(row["way"], row["sparse_calls"]) for row in found] == [
        ("PyTorch", 0),
        ("topk 1", 2),
        ("topk 0.3", 2),
    ]
    assert all(row["rel_l2"] < 1e-6 and row["two_ms"] > 0 for row in found)

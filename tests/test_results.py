# SPDX-License-Identifier: Apache-2.0
"""The README's figures are those of benchmarks/results."""

from __future__ import annotations

import pytest

from benchmarks import report


def test_readme_tables_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["report", "--check"])
    assert report.main() == 0, "run: python -m benchmarks.report"


def test_each_figure_says_where_it_was_measured() -> None:
    for name in ("h200_attention.jsonl", "h200_comfyui.jsonl", "h200_memory.jsonl"):
        for row in report.read(name):
            assert row["gpu"] and row["commit"]

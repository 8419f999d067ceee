# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.whole_run` in real ComfyUI, with tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PACK = Path(__file__).parents[2]
AUTO = "auto budget 0.2, pvthreshd 50"


def rows_of(out: Path, env: dict[str, str], *options: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.whole_run", "--tiny", "--commit", "c0", *options]
    command += ["--out", str(out)]
    done = subprocess.run(command, env=env, cwd=PACK, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = map(json.loads, out.read_text("utf-8").splitlines())
    return {row["config"]: row for row in rows}


def test_two_models_one_by_one_beside_companions(comfyui_env, tmp_path) -> None:
    options = ["--models", "wan22", "--cfg", "3.5", "--one-by-one", "--steps", "6"]
    companions = ["--with", "easycache", "fp8", "--reuse-threshold", "3"]
    rows = rows_of(tmp_path / "rows.jsonl", comfyui_env, *options, *companions)
    beside = ("", " + EasyCache 3", " + fp8")
    assert list(rows) == [name + with_it for with_it in beside for name in ("default", AUTO)]
    assert all(len(row["seconds"]) == 12 and "refused" not in row for row in rows.values())
    assert rows[AUTO]["report"].count("[Sparge]") == 2 and rows[AUTO]["sparse_calls"] > 0
    assert rows["default + EasyCache 3"]["skipped_steps"] > 0
    assert 0 < rows["default + fp8"]["rel_l2_call"] < 0.1

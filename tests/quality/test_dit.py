# SPDX-License-Identifier: Apache-2.0
"""The small video DiT's calls, through the command line, on untrained weights."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.quality import data
from benchmarks.quality.__main__ import main
from benchmarks.quality.rows import read
from benchmarks.tiny_video_dit.model import Config, initialised
from sparge.plan.grid import TokenGrid

GRID = (5, 12, 10)  # 600 tokens: 5 query blocks


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> Path:
    monkeypatch.setattr(data, "FULL_GRID", GRID)
    config = Config(width=128, blocks=3, hidden=128)
    path = tmp_path / "weights.safetensors"
    header = {"model": json.dumps(asdict(config)), "training": json.dumps({"step": 0})}
    save_file(initialised(config, seed % 2**32).state_dict(), path, header)
    return path


def test_rows_of_the_asked_layers(weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    sample = ["--blocks", "1", "--calibration-blocks", "1", "--layers", "0", "2"]
    modes = ["--modes", "drop", "ours auto"]
    asked = ["--data", "dit", "--densities", "0.6", "--commit", "c0", *modes, *sample]
    main([*asked, "--weights", str(weights), "--out", str(out)])
    rows = read(out)
    assert [row["mode"] for row in rows] == ["drop", "ours auto"]
    for row in rows:
        assert row["data"] == "dit scene 0" and row["commit"] == "c0"
        assert row["worst_head"].split(" head ")[0] in ("dit 0", "dit 2")
        assert 0 < row["rel_l2"] < 1


def test_calibration_sees_an_earlier_step(weights: Path) -> None:
    options = Namespace(data="dit", weights=weights, seed=1, layers=[1])
    found = data.load(options)
    (judged,), (calibrated,) = found.judged, tuple(found.calibrated)
    assert judged.layer.name == calibrated.layer.name == "dit 1"
    assert judged.layer.q.shape == (1, 1, 600, 128) and judged.layer.grid == TokenGrid(*GRID)
    assert not torch.equal(judged.layer.q, calibrated.layer.q)

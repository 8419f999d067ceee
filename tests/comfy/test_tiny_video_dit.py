# SPDX-License-Identifier: Apache-2.0
"""Real ComfyUI loads the small video model as Wan and computes what our own network computes, and
its clips with the node are as near to the dense ones as they should be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.quality.dit import load_dit, sample_dense
from benchmarks.quality.end_to_end import Clips
from benchmarks.quality.modes import BY_NAME
from benchmarks.quality.rows import read

PACK = Path(__file__).parents[2]
SIZE = (4, 9, 10)  # 360 tokens
DENSITY = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiny_video_dit")


@pytest.fixture(scope="module")
def compared(comfyui, folder):
    return comfyui.run("compare", folder=str(folder))


def test_the_loader_sees_wan(compared) -> None:
    assert compared["model"] == "WAN21"
    assert compared["missing"] == []
    assert (compared["blocks"], compared["heads"], compared["text_width"]) == (8, 2, 64)


@pytest.mark.parametrize(
    ("part", "tolerance"),
    # float32 on outputs of a few units.
    [("forward", 1e-4), ("sampled", 1e-3), ("schedule", 1e-6)],
)
def test_the_numbers_are_comfyuis(compared, part, tolerance) -> None:
    assert compared[part]["magnitude"] > 0.5
    assert compared[part]["difference"] < tolerance


@pytest.fixture(scope="module")
def rows(compared, comfyui_env, folder):
    """Rows of the weights that `compared` wrote, by mode."""
    weights, out = folder / "tiny_video_dit.safetensors", folder / "rows.json"
    grid = ["--grid", *map(str, SIZE), "--densities", str(DENSITY)]
    command = ["-m", "benchmarks.tiny_video_dit.comfyui_clip", "--weights", str(weights)]
    done = subprocess.run(
        [sys.executable, *command, *grid, "--clips", "1", "--commit", "c0", "--out", str(out)],
        env=comfyui_env,
        cwd=PACK,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {row["mode"]: row for row in read(out)}


def test_clips_with_the_node_are_near_the_dense_ones(rows) -> None:
    assert list(rows) == ["drop", "ours manual", "ours auto"]
    for row in rows.values():
        assert row["data"] == "dit comfyui clips 0-0 4x9x10"
        assert 0.25 < row["density"] < 0.75  # of 6 key blocks manual keeps 4, in whole steps
        assert 30 < row["psnr"] < 70
    assert rows["ours auto"]["psnr"] > rows["drop"]["psnr"]


def test_drop_in_comfyui_is_drop_in_our_sampler(rows, folder) -> None:
    model = load_dit(folder / "tiny_video_dit.safetensors", torch.device("cpu"))
    clips = Clips([sample_dense(model, SIZE, 0)])
    expected = clips.row(BY_NAME["drop"], DENSITY)
    assert rows["drop"]["density"] == pytest.approx(expected["density"], abs=0.005)
    assert rows["drop"]["psnr"] == pytest.approx(expected["psnr"], abs=0.2)

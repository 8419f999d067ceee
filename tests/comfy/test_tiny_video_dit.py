# SPDX-License-Identifier: Apache-2.0
"""Real ComfyUI loads the small video model as Wan and computes what our own network computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACK = HERE.parent.parent


@pytest.fixture(scope="module")
def compared(comfyui_env, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_video_dit")
    # ComfyUI first: this repository has a folder called nodes too.
    path = os.pathsep.join([comfyui_env["PYTHONPATH"], str(PACK)])
    done = subprocess.run(
        [sys.executable, str(HERE / "tiny_video_dit_process.py"), str(folder)],
        env=comfyui_env | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_the_loader_sees_wan(compared) -> None:
    assert compared["model"] == "WAN21"
    assert compared["missing"] == []
    assert (compared["blocks"], compared["heads"], compared["text_width"]) == (8, 2, 64)


@pytest.mark.parametrize(
    ("part", "tolerance"),
    # float32 on outputs of a few units; six steps at guidance 3 multiply it.
    [("forward", 1e-4), ("sampled", 1e-3), ("schedule", 1e-6)],
)
def test_the_numbers_are_comfyuis(compared, part, tolerance) -> None:
    assert compared[part]["magnitude"] > 0.5
    assert compared[part]["difference"] < tolerance

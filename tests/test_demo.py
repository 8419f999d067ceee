# SPDX-License-Identifier: Apache-2.0
"""The demos at sizes that take no time: tables are measured, pictures are pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks.demo import call, trained
from benchmarks.quality.dit import DenseRun, sample_dense
from tests.tiny_video_dit.parts import busy_model


@pytest.fixture
def dense(generator: torch.Generator) -> DenseRun:
    return sample_dense(busy_model(generator, peak=2.0), (4, 9, 10), 0)


def test_a_clip_of_trained_weights(tmp_path: Path, dense: DenseRun) -> None:
    first, *sparser = trained.run(dense, tmp_path)
    assert first.density == 1 and first.clip.shape == (4, 36, 80, 3)
    names = ["sparge, auto 0.5", "plain drop 0.2", "sparge, auto 0.2"]
    assert [row.name for row in sparser] == names
    half, dropped, fifth = sparser
    for less in (dropped, fifth):
        assert less.density < half.density < 1
        assert less.psnr < half.psnr < 70
    with Image.open(tmp_path / "demo.png") as picture:
        panels = 2 + len(trained.COMPARED)
        assert picture.width == panels * (4 * 80 + trained.MARGIN)
    with Image.open(tmp_path / "demo.gif") as gif:
        assert gif.n_frames == 4


def test_a_call_of_the_clip(tmp_path: Path, dense: DenseRun) -> None:
    torch_row, everything, *sparser = call.run(dense, tmp_path)
    assert torch_row.density == everything.density == 1.0
    assert 0 < everything.rel_l1 < 0.02
    for less, more in zip(sparser[1:], sparser, strict=False):
        assert less.density <= more.density < 1 and less.rel_l2 >= more.rel_l2
    with Image.open(tmp_path / "attention.png") as picture:
        assert len(picture.convert("RGB").getcolors(2**24)) > 50

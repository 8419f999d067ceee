# SPDX-License-Identifier: Apache-2.0
"""The demo at a size that takes no time: its table is measured, its picture is a picture."""

from __future__ import annotations

import argparse
import struct
import zlib
from pathlib import Path

import pytest
import torch

from benchmarks import demo
from benchmarks.png import write_png
from benchmarks.video_like import video_like
from sparge.kernels import Capability


def read_png(path: Path) -> torch.Tensor:
    """What `write_png` writes: 8-bit RGB, unfiltered, one IDAT."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        named, at = data[at + 4 : at + 8 + size], at + 12 + size
        assert struct.unpack(">I", data[at - 4 : at])[0] == zlib.crc32(named)
        chunks[named[:4]] = named[4:]
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8)
    lines = lines.reshape(height, 1 + 3 * width)
    assert lines[:, 0].max() == 0
    return lines[:, 1:].reshape(height, width, 3)


def test_png_round_trip(tmp_path: Path, generator: torch.Generator) -> None:
    pixels = torch.randint(0, 256, (5, 7, 3), generator=generator).byte()
    write_png(tmp_path / "x.png", pixels)
    assert torch.equal(read_png(tmp_path / "x.png"), pixels)


def test_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = demo.Size((4, 12, 20), text_tokens=20, heads=6, head_dim=32)
    options = argparse.Namespace(out=tmp_path / "new" / "folder", seed=1)
    cpu = torch.device("cpu")
    table = demo.run(size, cpu, "a sentence", options)
    assert "Ran: a sentence" in capsys.readouterr().out
    dense, everything, *sparser = table
    assert dense.density == everything.density == 1.0
    assert 0 < everything.rel_l1 < 0.01
    for less, more in zip(sparser[1:], sparser, strict=False):
        assert less.density < more.density < 1
        assert less.rel_l2 > more.rel_l2 > everything.rel_l2
    picture = read_png(tmp_path / "new" / "folder" / "demo.png")
    assert len(picture.unique()) > 50


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_cpu_says_that_it_is_the_reference_and_why(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_old = Capability(False, "this GPU is too old")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(demo.sparge, "capabilities", lambda device: too_old)
    device, sentence = demo.choose_device()
    assert device.type == "cpu"
    assert "reference" in sentence
    assert (too_old.reason if has_gpu else "finds no CUDA GPU") in sentence


def test_the_example_is_video_like() -> None:
    """Figures of real video transformers: 95 % of the mass in few keys, and heads that disagree."""
    example = video_like((4, 16, 24), 6, 64, text_tokens=32, seed=5)
    again = video_like((4, 16, 24), 6, 64, text_tokens=32, seed=5)
    assert torch.equal(example.q, again.q)
    weights = (example.q.float() @ example.k.float().mT / 8).softmax(-1)
    mass = weights.sort(-1, descending=True).values.cumsum(-1)
    keys = ((mass < 0.95).sum(-1) + 1).float().mean(-1)[0] / example.k.shape[2]
    assert 0.005 < keys.min() < 0.1
    assert 0.3 < keys.max() < 0.95
    assert keys.median() < 0.3
    offset = example.k.float().mean(2).abs() / example.k.float().std(2)
    assert (offset.amax(-1) > 3).all(), "some K channels lie far from zero"

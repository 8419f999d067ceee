# SPDX-License-Identifier: Apache-2.0
"""The demos at sizes that take no time: tables are measured, pictures are pictures."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
import torch

from benchmarks.demo import device as demo_device
from benchmarks.demo import made_up, trained
from benchmarks.demo.__main__ import main
from benchmarks.png import write_png
from benchmarks.tiny_video_dit import checkpoint
from benchmarks.tiny_video_dit.model import Config, VideoDiT
from benchmarks.tiny_video_dit.training_state import TrainingState
from benchmarks.video_like import video_like
from sparge.kernels import Capability


def read_png(path: Path) -> torch.Tensor:
    """Reads what `write_png` writes: 8-bit RGB, unfiltered, one IDAT."""
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


def test_table_and_picture(tmp_path: Path) -> None:
    size = made_up.Size((4, 12, 20), text_tokens=20, heads=6, head_dim=32)
    table = made_up.run(size, torch.device("cpu"), 1, tmp_path)
    dense, everything, *sparser = table
    assert dense.density == everything.density == 1.0
    assert 0 < everything.rel_l1 < 0.01
    for less, more in zip(sparser[1:], sparser, strict=False):
        assert less.density < more.density < 1
        assert less.rel_l2 > more.rel_l2 > everything.rel_l2
    picture = read_png(tmp_path / "attention.png")
    assert len(picture.unique()) > 50


def test_a_clip_of_trained_weights(tmp_path: Path, generator: torch.Generator) -> None:
    model = VideoDiT(Config(width=128, blocks=2, hidden=128)).requires_grad_(False)
    for name, parameter in model.named_parameters():
        spread = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
        parameter.normal_(2.0 if "norm" in name else 0.0, spread, generator=generator)
    checkpoint.save(tmp_path, TrainingState(model, torch.device("cpu")), model.config, {})
    weights = tmp_path / checkpoint.WEIGHTS
    table = trained.run((4, 9, 10), torch.device("cpu"), weights, 0, tmp_path)
    dense, *sparser = table
    assert dense.density == 1 and dense.clip.shape == (4, 36, 80, 3)
    assert [row.name for row in sparser] == [
        "sparge, auto 0.5",
        "plain drop 0.2",
        "sparge, auto 0.2",
    ]
    half, dropped, fifth = sparser
    for less in (dropped, fifth):
        assert less.density < half.density < 1
        assert less.psnr < half.psnr < 70
    picture = read_png(tmp_path / "demo.png")
    assert picture.shape[1] == (2 + len(trained.COMPARED)) * (4 * 80 + trained.MARGIN)
    assert (tmp_path / "demo.gif").read_bytes().startswith(b"GIF89a")


@pytest.mark.parametrize("there", [False, True])
def test_the_clip_is_shown_first_where_its_weights_are(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(trained, "run", lambda *given: ran.append("trained"))
    monkeypatch.setattr(made_up, "run", lambda *given: ran.append("made up"))
    weights = tmp_path / "weights.safetensors"
    if there:
        weights.touch()
    main(["--out", str(tmp_path / "new" / "folder"), "--weights", str(weights)])
    assert ran == ["trained", "made up"] if there else ["made up"]
    assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_cpu_says_that_it_is_the_reference_and_why(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_old = Capability(False, "this GPU is too old")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(demo_device.sparge, "capabilities", lambda device: too_old)
    device, sentence = demo_device.choose_device()
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

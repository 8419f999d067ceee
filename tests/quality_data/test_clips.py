# SPDX-License-Identifier: Apache-2.0
"""Clips are repeatable and move; frames of files come evenly spaced and at the asked size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks.quality_data import frames
from benchmarks.quality_data.clips import make_clip
from benchmarks.quality_data.frames import Clip, NoDecoderError, read_video, resize


@pytest.mark.parametrize("size", [(5, 40, 61), (1, 33, 20), (3, 1, 7)])
def test_the_same_seed_the_same_clip(size: tuple[int, int, int], seed: int) -> None:
    clip = make_clip(*size, seed=seed)
    assert clip.shape == (*size, 3)
    assert clip.dtype == np.uint8
    assert np.array_equal(clip, make_clip(*size, seed=seed))
    assert not np.array_equal(clip, make_clip(*size, seed=seed + 1))


def test_every_frame_moves_a_little(seed: int) -> None:
    clip = make_clip(12, 64, 96, seed=seed).astype(float)
    assert clip.std() > 10
    step = np.abs(np.diff(clip, axis=0)).mean((1, 2, 3))
    whole = np.abs(clip[-1] - clip[0]).mean()
    assert step.min() > 0
    assert step.mean() < whole  # near frames are alike, far ones less


def test_a_clip_has_the_same_content_at_every_size(seed: int) -> None:
    small = resize(make_clip(2, 32, 48, seed=seed), (32, 48))
    large = resize(make_clip(2, 128, 192, seed=seed), (32, 48))
    assert float((small - large).abs().mean()) < 0.3 * float((large - large.mean()).abs().mean())


def test_empty_clips_are_refused() -> None:
    with pytest.raises(ValueError, match="0 x 8 x 8 is empty"):
        make_clip(0, 8, 8)


def test_resize_takes_the_middle() -> None:
    clip = np.zeros((1, 20, 60, 3), np.uint8)
    clip[:, :, 20:40] = 255
    torch.testing.assert_close(resize(clip, (10, 10)), torch.full((1, 3, 10, 10), 255.0))
    assert resize(clip, (30, 90)).shape == (1, 3, 30, 90)


def count_to(total: int) -> Callable[[ModuleType, Path], Iterator[Clip]]:
    """A decoder whose frame number n is filled with n."""

    def decode(module: ModuleType, path: Path) -> Iterator[Clip]:
        assert module.__name__ == "a_decoder"
        return (np.full((2, 2, 3), index, np.uint8) for index in range(total))

    return decode


def test_frames_are_evenly_spaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a_decoder.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(frames, "DECODERS", {"not_installed_": None, "a_decoder": count_to(49)})
    taken = read_video(Path("x.mp4"), 12)[:, 0, 0, 0].tolist()
    assert taken == [0, 4, 9, 13, 17, 22, 26, 31, 35, 39, 44, 48]
    with pytest.raises(ValueError, match="49 frames; 50 are needed"):
        read_video(Path("x.mp4"), 50)


def test_decoded_frames_need_no_decoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(frames, "DECODERS", {})
    every = np.arange(7 * 2 * 2 * 3, dtype=np.uint8).reshape(7, 2, 2, 3)
    np.savez_compressed(tmp_path / "x.npz", frames=every)
    assert np.array_equal(read_video(tmp_path / "x.npz", 3), every[[0, 3, 6]])
    with pytest.raises(ValueError, match="7 frames; 8 are needed"):
        read_video(tmp_path / "x.npz", 8)


def test_without_a_decoder_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "DECODERS", {"not_installed_": None})
    with pytest.raises(NoDecoderError, match="pip install av"):
        read_video(Path("x.mp4"), 2)


def test_installed_decoders_agree(tmp_path: Path) -> None:
    """A clip written with cv2 comes back, by each decoder that is here, as that clip."""
    cv2 = pytest.importorskip("cv2", reason="needs opencv to write a video")
    path = tmp_path / "x.avi"
    # Smooth, since JPEG halves the resolution of colour: red grows to the right, green down, blue
    # with time.
    clip = np.zeros((6, 64, 96, 3), np.uint8)
    clip[..., 0], clip[..., 1] = np.arange(96) * 2, np.arange(64)[:, None] * 3
    clip[..., 2] = np.arange(6)[:, None, None] * 40
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 8, (96, 64))
    for frame in clip:
        writer.write(np.ascontiguousarray(frame[:, :, ::-1]))
    writer.release()
    here = {name: import_module(name) for name in frames.DECODERS if find_spec(name)}
    assert "cv2" in here
    for name, module in here.items():
        read = np.stack(list(frames.DECODERS[name](module, path))).astype(float)
        assert read.shape == clip.shape, name
        assert np.abs(read - clip).mean() < 4, name  # a frame off is 13, red for blue over 40

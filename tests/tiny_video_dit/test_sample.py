# SPDX-License-Identifier: Apache-2.0
"""Sampling outside ComfyUI and its pictures. Equality with ComfyUI's sampler is in tests/comfy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.tiny_video_dit import checkpoint, flow
from benchmarks.tiny_video_dit.gif import LEVELS, write_gif
from benchmarks.tiny_video_dit.model import dense
from benchmarks.tiny_video_dit.sample import main, sample, starting_noise
from benchmarks.tiny_video_dit.train import Trainer

GRID = (2, 3, 4)


class Oracle(nn.Module):
    """Answers the flow from `noise` to the clip that the text gives."""

    def __init__(self, noise: torch.Tensor) -> None:
        super().__init__()
        self.noise = nn.Parameter(noise)
        self.timesteps: list[float] = []

    def forward(self, latent, timestep, context, attention):
        self.timesteps.append(float(timestep[0]))
        return self.noise - context.mean((1, 2)).view(-1, 1, 1, 1, 1)


@pytest.mark.parametrize("steps", [1, 7])
def test_a_true_flow_ends_at_the_clip(steps) -> None:
    noise = starting_noise(2, GRID, seed=3)
    oracle = Oracle(noise)
    text = torch.tensor([0.5, -2.0]).view(2, 1, 1).expand(2, 7, 64)
    made = sample(oracle, noise, text, steps)
    expected = text[:, 0, 0].view(2, 1, 1, 1, 1).expand_as(noise)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)
    assert oracle.timesteps[0] == 1000 and len(oracle.timesteps) == steps


def test_guidance_goes_beyond_the_text() -> None:
    noise = starting_noise(1, GRID, seed=4)
    made = sample(Oracle(noise), noise, torch.ones(1, 7, 64), steps=4, guidance=3.0)
    torch.testing.assert_close(made, torch.full_like(noise, 3.0), rtol=0, atol=1e-5)


def test_a_noisy_latent_is_on_the_path(generator) -> None:
    clip, noise = torch.randn(2, 3, 4, generator=generator).unbind(0)
    mixed = flow.noisy(clip, noise, torch.tensor([0.0, 0.25, 1.0]))
    torch.testing.assert_close(mixed[0], clip[0])
    torch.testing.assert_close(mixed[1], 0.25 * noise[1] + 0.75 * clip[1])
    torch.testing.assert_close(mixed[2], noise[2])


def test_training_covers_all_noise_levels(generator) -> None:
    sigmas = flow.training_sigmas(8, generator)
    bounds = flow.shifted(torch.arange(9) / 8, flow.TRAINING_SHIFT)
    assert ((sigmas >= bounds[:-1]) & (sigmas <= bounds[1:])).all()


def test_attention_reaches_every_step_and_block(toy_model) -> None:
    blocks = []

    def spy(q, k, v, block):
        blocks.append(block)
        return dense(q, k, v, block)

    noise = starting_noise(1, GRID, seed=0)
    sample(toy_model, noise, torch.zeros(1, 7, 64), steps=3, attention=spy)
    assert blocks == [0, 1] * 3


def test_command_writes_pictures(toy, toy_phases, tmp_path, capsys) -> None:
    trainer = Trainer(toy, 0, torch.device("cpu"), toy_phases)
    checkpoint.save(tmp_path, trainer.state, toy, {})
    weights = str(tmp_path / checkpoint.WEIGHTS)
    size = ["--steps", "2", "--clips", "2", "--grid", "2", "3", "4"]
    main(["--weights", weights, "--out", str(tmp_path), *size])
    assert "2 clips in" in capsys.readouterr().out
    assert (tmp_path / "samples.png").read_bytes()[:4] == b"\x89PNG"
    frames = read_gif((tmp_path / "samples.gif").read_bytes())
    assert len(frames) == 2 and frames[0].shape == (2 * 3 * 4, 2 * 4 * 8, 3)


def test_gif_shows_the_pixels(generator, tmp_path) -> None:
    """Noise fills the table of codes until it starts again; a flat part makes long codes."""
    frames = torch.rand(2, 70, 90, 3, generator=generator)
    frames[1, 20:50] = torch.tensor([0.2, 0.5, 0.9])
    write_gif(tmp_path / "x.gif", frames)
    shown = torch.stack(read_gif((tmp_path / "x.gif").read_bytes()))
    step = 1 / (min(LEVELS) - 1)
    assert (shown - frames).abs().max() < 1.01 * step
    assert (shown[1, 20:50].mean((0, 1)) - frames[1, 20, 0]).abs().max() < 0.02


def read_gif(data: bytes) -> list[torch.Tensor]:
    """Frames (height, width, 3) in [0, 1]: enough of a decoder for what write_gif writes."""
    assert data[:6] == b"GIF89a" and data[-1:] == b";"
    palette = torch.tensor(list(data[13 : 13 + 768])).view(256, 3) / 255
    at, frames = 13 + 768, []
    while data[at] != ord(";"):
        if data[at] == ord("!"):
            _, at = sub_blocks(data, at + 2)
            continue
        width, height = (int.from_bytes(data[at + i : at + i + 2], "little") for i in (5, 7))
        codes, at = sub_blocks(data, at + 11)
        frames.append(palette[torch.tensor(unpacked(codes))].view(height, width, 3))
    return frames


def sub_blocks(data: bytes, at: int) -> tuple[bytes, int]:
    joined = b""
    while data[at]:
        joined += data[at + 1 : at + 1 + data[at]]
        at += 1 + data[at]
    return joined, at + 1


def unpacked(codes: bytes) -> list[int]:
    """LZW with 8-bit symbols: 256 clears, 257 ends."""
    stream, position, pixels = int.from_bytes(codes, "little"), 0, []
    single = [[value] for value in range(256)] + [[], []]
    table, bits, last = list(single), 9, []
    while True:
        code = stream >> position & ((1 << bits) - 1)
        position += bits
        if code == 256:
            table, bits, last = list(single), 9, []
            continue
        if code == 257:
            return pixels
        word = table[code] if code < len(table) else [*last, last[0]]
        pixels += word
        if last and len(table) < 4096:
            table.append([*last, word[0]])
        if len(table) == 1 << bits and bits < 12:
            bits += 1
        last = word

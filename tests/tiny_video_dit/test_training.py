# SPDX-License-Identifier: Apache-2.0
"""Training steps at toy size: the optimizer, the curriculum, and resuming."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch

from benchmarks.tiny_video_dit import checkpoint, train
from benchmarks.tiny_video_dit.clips import draw_clips
from benchmarks.tiny_video_dit.curriculum import FULL, FULL_GRID, batch_at
from benchmarks.tiny_video_dit.latent import clip_size, to_latent
from benchmarks.tiny_video_dit.scenes import context, draw_scenes
from benchmarks.tiny_video_dit.train import Trainer, train_for

CPU = torch.device("cpu")


def test_the_loss_falls(toy, toy_phases, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.tiny_video_dit.train.rate_at", lambda progress: 3e-3)
    trainer = Trainer(toy, 1, CPU, toy_phases)
    batch = toy_phases[0].batches[0]
    before = trainer.validation_loss(batch, clips=4)
    for _ in range(20):
        trainer.step(0.0)
    assert trainer.validation_loss(batch, clips=4) < 0.9 * before


def test_examples_are_on_the_path_from_clip_to_noise(toy_phases) -> None:
    batch, seed = toy_phases[0].batches[0], 9
    example = train.draw_example(batch, seed, CPU)
    sigmas = (example.timestep / 1000).view(-1, 1, 1, 1, 1)
    size = clip_size(batch.grid)
    scenes = draw_scenes(batch.clips, size, torch.Generator().manual_seed(seed))
    clean = to_latent(draw_clips(scenes, size))
    found = example.latent.float() - sigmas * example.flow
    torch.testing.assert_close(found, clean, rtol=0, atol=0.03)  # the latent is bf16
    assert example.timestep.min() >= 0 and example.timestep.max() <= 1000
    torch.testing.assert_close(example.context.float(), context(scenes), rtol=0, atol=0.03)


def test_training_ends_when_the_loss_does(toy, toy_phases, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.tiny_video_dit.train.LOG_EVERY", 1)
    trainer = Trainer(toy, 2, CPU, toy_phases)
    trainer.optimizer.show(weight * math.nan for weight in trainer.optimizer.weights)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1"):
        train_for(trainer, 5.0)


def test_the_curriculum_ends_at_the_judged_size() -> None:
    longest = []
    for progress in (0.0, 0.5, 0.99):
        batches = [batch_at(step, progress) for step in range(12)]
        longest.append(max(batch.tokens // batch.clips for batch in batches))
        assert all(abs(batch.tokens - FULL.tokens) < 0.1 * FULL.tokens for batch in batches)
    assert longest == sorted(longest)
    assert batch_at(0, 1.0).grid == FULL_GRID


def test_the_command_trains_and_says_how(toy, toy_phases, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(train, "Config", lambda: toy)
    monkeypatch.setattr(train, "FULL", toy_phases[1].batches[0])
    monkeypatch.setattr(train, "Trainer", partial(Trainer, phases=toy_phases))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    named = ["--seconds", "0.2", "--seed", "3", "--commit", "abc", "--blocks", "1"]
    train.main(["--out", str(tmp_path), *named])
    weights = tmp_path / checkpoint.WEIGHTS
    about = checkpoint.describe(weights)["training"]
    assert (about["seconds"], about["seed"], about["commit"]) == (0.2, 3, "abc")
    assert about["step"] > 0 and about["loss"] > 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"step": about["step"], "validation_loss": about["loss"]}
    assert checkpoint.load_model(weights).config.blocks == 1 < toy.blocks

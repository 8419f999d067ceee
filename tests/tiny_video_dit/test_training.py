# SPDX-License-Identifier: Apache-2.0
"""Training steps at toy size: the optimizer, the curriculum, and resuming."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from benchmarks.tiny_video_dit import checkpoint, train, training_state
from benchmarks.tiny_video_dit.clips import draw_clips
from benchmarks.tiny_video_dit.curriculum import FULL, FULL_GRID, PEAK_RATE, batch_at, rate_at
from benchmarks.tiny_video_dit.latent import clip_size, to_latent
from benchmarks.tiny_video_dit.model import Config
from benchmarks.tiny_video_dit.scenes import context, draw_scenes
from benchmarks.tiny_video_dit.train import Trainer, train_for
from benchmarks.tiny_video_dit.training_state import TrainingState

CPU = torch.device("cpu")
STEPS = 6


def run(trainer: Trainer, until: int) -> list[float]:
    first = trainer.state.counters.step
    return [trainer.step(number / STEPS)[1].item() for number in range(first, until)]


@pytest.fixture
def halfway(toy, toy_phases, tmp_path) -> Trainer:
    """A trainer that took three steps and saved to tmp_path."""
    trainer = Trainer(toy, 5, CPU, toy_phases)
    run(trainer, STEPS // 2)
    trainer.state.counters.seconds = 7.5
    checkpoint.save(tmp_path, trainer.state, toy, {"loss": 0.5, "seed": 5, "commit": "abc"})
    return trainer


def test_resuming_is_going_on(halfway, toy, toy_phases, tmp_path) -> None:
    resumed = Trainer(toy, 5, CPU, toy_phases)
    checkpoint.resume(tmp_path, resumed.state)
    assert resumed.state.counters == halfway.state.counters
    assert run(resumed, STEPS) == run(halfway, STEPS)
    for vector in ("weights", "average", "first", "second", "working"):
        assert torch.equal(getattr(resumed.state, vector), getattr(halfway.state, vector)), vector


def test_saving_barely_moves_the_weights(toy, toy_phases, tmp_path) -> None:
    trainer = Trainer(toy, 6, CPU, toy_phases)
    run(trainer, STEPS)
    before = trainer.state.weights.clone()
    checkpoint.save(tmp_path, trainer.state, toy, {})
    moved = (trainer.state.weights - before).norm() / before.norm()
    assert moved < 2**-13  # bf16 alone would be 2^-10


def test_weights_say_how_they_were_made(halfway, toy, tmp_path) -> None:
    said = checkpoint.describe(tmp_path / checkpoint.WEIGHTS)
    assert said["training"] == {
        "step": 3,
        "seconds": 7.5,
        "loss": 0.5,
        "seed": 5,
        "commit": "abc",
    }
    model = checkpoint.load_model(tmp_path / checkpoint.WEIGHTS)
    assert model.config == toy
    averages = halfway.state.named(halfway.state.average)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, averages[name].bfloat16()), name


def test_another_model_is_refused(halfway, toy_phases, tmp_path) -> None:
    other = Trainer(Config(width=128, blocks=1, hidden=128), 5, CPU, toy_phases)
    with pytest.raises(ValueError, match=r"checkpoint of another model.*blocks\.1"):
        checkpoint.resume(tmp_path, other.state)


def test_steps_are_adamw(toy, monkeypatch) -> None:
    monkeypatch.setattr(training_state, "WORKING_TYPE", torch.float32)
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 4)
    twin = torch.nn.Linear(5, 4)
    twin.load_state_dict(layer.state_dict())
    state = TrainingState(layer, CPU)
    adamw = torch.optim.AdamW(
        [
            {"params": [twin.weight], "weight_decay": training_state.WEIGHT_DECAY},
            {"params": [twin.bias], "weight_decay": 0.0},
        ],
        betas=(training_state.FIRST_DECAY, training_state.SECOND_DECAY),
    )
    for step in range(5):
        rate, given = 0.1 / (step + 1), torch.randn(7, 5)
        for group in adamw.param_groups:
            group["lr"] = rate
        for module in (layer, twin):
            (module(given).square().mean() * 50).backward()
        expected = torch.nn.utils.clip_grad_norm_(
            twin.parameters(), training_state.LARGEST_GRADIENT
        )
        torch.testing.assert_close(state.update(rate), expected)
        adamw.step()
        adamw.zero_grad()
        torch.testing.assert_close(layer.weight, twin.weight)
        torch.testing.assert_close(layer.bias, twin.bias)


def test_the_loss_falls(toy, toy_phases, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.tiny_video_dit.train.rate_at", _constant_rate)
    trainer = Trainer(toy, 1, CPU, toy_phases)
    batch = toy_phases[0].batches[0]
    before = trainer.validation_loss(batch, clips=4)
    for _ in range(20):
        trainer.step(0.0)
    assert trainer.validation_loss(batch, clips=4) < 0.9 * before


def _constant_rate(progress: float) -> float:
    return 3e-3


def test_training_stops_by_the_clock_and_logs(toy, toy_phases, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.tiny_video_dit.train.LOG_EVERY", 1)
    trainer = Trainer(toy, 2, CPU, toy_phases)
    trainer.state.counters.seconds = 10.0
    lines: list[dict[str, float | str]] = []
    train_for(trainer, 0.3, 100.0, lines.append)
    assert trainer.state.counters.seconds == pytest.approx(10.3)
    assert [line["step"] for line in lines] == list(range(1, trainer.state.counters.step + 1))
    assert json.loads(json.dumps(lines[0]))["grid"] == "2x5x4"


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


def test_commands_go_on_from_each_other(toy, toy_phases, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(train, "Config", lambda: toy)
    monkeypatch.setattr(train, "FULL", toy_phases[1].batches[0])
    monkeypatch.setattr(train, "Trainer", partial(Trainer, phases=toy_phases))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shared = ["--seconds", "0.2", "--planned-seconds", "0.4", "--seed", "3", "--commit", "abc"]
    shared += ["--blocks", "1"]
    first, second = tmp_path / "first", tmp_path / "second"
    train.main(["--out", str(first), *shared])
    train.main(["--out", str(second), "--resume", str(first), *shared])
    headers = [checkpoint.describe(folder / checkpoint.WEIGHTS) for folder in (first, second)]
    assert [header["model"]["blocks"] for header in headers] == [1, 1] and toy.blocks > 1
    before, after = (header["training"] for header in headers)
    assert after["step"] > before["step"] > 0
    assert (before["seconds"], after["seconds"]) == pytest.approx((0.2, 0.4))
    assert (after["seed"], after["commit"]) == (3, "abc") and after["loss"] > 0
    last = json.loads((second / "log.jsonl").read_text().splitlines()[-1])
    assert last == {"step": after["step"], "validation_loss": after["loss"]}


def test_training_ends_when_the_loss_does(toy, toy_phases, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.tiny_video_dit.train.LOG_EVERY", 1)
    trainer = Trainer(toy, 2, CPU, toy_phases)
    trainer.state.working.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1"):
        train_for(trainer, 5.0, 5.0, [].append)


def test_the_curriculum_ends_at_the_judged_size() -> None:
    longest = dict.fromkeys((0.0, 0.5, 0.99), 0)
    for progress in longest:
        batches = [batch_at(step, progress) for step in range(12)]
        longest[progress] = max(batch.tokens // batch.clips for batch in batches)
        assert all(abs(batch.tokens - FULL.tokens) < 0.1 * FULL.tokens for batch in batches)
    assert list(longest.values()) == sorted(longest.values())
    assert batch_at(0, 1.0).grid == FULL_GRID


def test_the_rate_rises_then_falls() -> None:
    rates = [rate_at(progress / 100) for progress in range(101)]
    top = rates.index(max(rates))
    assert 0 < rates[0] < rates[1] and 0.9 * PEAK_RATE < rates[top] <= PEAK_RATE
    assert rates[top:] == sorted(rates[top:], reverse=True) and rates[-1] < 0.02 * PEAK_RATE

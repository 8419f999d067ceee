# SPDX-License-Identifier: Apache-2.0
"""The small video DiT, calls and whole clips, on random weights in which no part is idle."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.quality import data, end_to_end, steps
from benchmarks.quality.__main__ import main
from benchmarks.quality.dit import JUDGED_STEPS, STEPS, DenseRun, sample_dense
from benchmarks.quality.end_to_end import Clips, clip_psnr
from benchmarks.quality.modes import BY_NAME, MODES, Mode
from benchmarks.quality.rows import EMULATION, REFERENCE, read
from benchmarks.tiny_video_dit import checkpoint
from benchmarks.tiny_video_dit.latent import to_clips
from benchmarks.tiny_video_dit.model import Config, VideoDiT
from benchmarks.tiny_video_dit.sample import sample, starting_noise
from benchmarks.tiny_video_dit.training_state import TrainingState
from sparge.order.grid import TokenGrid

SIZE = (5, 12, 10)  # 600 tokens: 5 query blocks, 10 key blocks
RAGGED = 640 / 600  # budgets count the last block as a whole one
GRID = ["--grid", *map(str, SIZE)]


@pytest.fixture(scope="module")
def model() -> VideoDiT:
    model = VideoDiT(Config(width=128, blocks=2, hidden=128)).requires_grad_(False)
    random = torch.Generator().manual_seed(21)
    for name, parameter in model.named_parameters():
        spread = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
        peaked = 2.0 if "self_attn.norm" in name else 1.0  # heads that do not look everywhere
        parameter.normal_(peaked if "norm" in name else 0.0, spread, generator=random)
    return model


@pytest.fixture(scope="module")
def run(model: VideoDiT) -> DenseRun:
    return sample_dense(model, SIZE, seed=4, judged_steps=JUDGED_STEPS)


@pytest.fixture(scope="module")
def weights(model: VideoDiT, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    copied = VideoDiT(model.config)
    copied.load_state_dict(model.state_dict())
    checkpoint.save(folder, TrainingState(copied, torch.device("cpu")), model.config, {})
    return folder / checkpoint.WEIGHTS


def test_a_dense_run_is_the_sampler_and_sees_its_calls(run: DenseRun, model: VideoDiT) -> None:
    expected = to_clips(sample(model, starting_noise(1, SIZE, 4), run.text, STEPS))[0]
    assert torch.equal(run.clip, expected)
    assert torch.equal(run.finished(), expected)
    assert [call.place for call in run.calibrated] == [0, 1]
    assert [call.layer.name for call in run.judged] == [
        f"dit step {step} layer {layer}" for step in JUDGED_STEPS for layer in range(2)
    ]
    assert run.judged[0].layer.q.shape == (1, 1, 600, 128)
    assert run.judged[0].layer.grid == TokenGrid(*SIZE)


@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
def test_clips_in_a_mode_get_near_the_dense_one_with_density(run: DenseRun, mode: Mode) -> None:
    clips = Clips([run])
    rows = [clips.row(mode, density, end_to_end.emulated) for density in (0.2, 0.6, 1.0)]
    for row in rows:
        assert row["density"] <= RAGGED * row["asked_density"]
    sparse, denser, dense = (row["psnr"] for row in rows)
    assert sparse + 2 < denser < dense - 3
    assert dense > 45, "8 bits cost little"
    assert rows[0]["data"] == "dit clips 4-4 5x12x10"


@pytest.mark.parametrize("name", ["drop", "ours manual", "ours auto"])
def test_the_library_makes_the_emulated_clip(run: DenseRun, name: str) -> None:
    mode = BY_NAME[name]
    budgets = Clips([run]).budgets(0, mode, 0.3)
    made = []
    for attending in (end_to_end.emulated, end_to_end.in_library):
        attention, density = attending(run, mode, budgets)
        made.append((run.finished(attention), density()))
    (emulated, one), (library, other) = made
    assert one == pytest.approx(other, abs=0.02), "each chooses on its own clip"
    assert clip_psnr(library, emulated) > clip_psnr(emulated, run.clip) + 6


def test_psnr_of_a_clip() -> None:
    clip = torch.zeros(2, 3, 4, 3)
    assert clip_psnr(clip + 0.1, clip) == pytest.approx(20)


def test_rows_of_calls_and_of_clips(weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    sample = ["--blocks", "1", "--calibration-blocks", "4", "--clips", "1", "--kernels"]
    modes = ["--modes", "sol", "ours auto", "--densities", "0.6", "--commit", "c0"]
    main(["--data", "dit", "--weights", str(weights), "--out", str(out), *modes, *sample, *GRID])
    rows = read(out)
    named = [(row["data"].split()[1], row["mode"], row["where"]) for row in rows]
    assert named == [
        ("scene", "sol", "emulation"),
        ("scene", "ours auto", "emulation"),
        ("scene", "ours auto", REFERENCE),
        ("clips", "sol", "emulation"),
        ("clips", "ours auto", REFERENCE),
    ]
    assert {"calls_within", "heads_within", "no_worse_than_drop"} <= rows[-1].keys()
    assert all(row["commit"] == "c0" and 5 < row["psnr"] < 90 for row in rows)
    assert rows[-1]["data"] == "dit clips 0-0 5x12x10"
    assert rows[1]["rel_l2"] == pytest.approx(rows[2]["rel_l2"], rel=0.1)


def test_rows_of_targets(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_drop", lambda q, k, v, budget: 0.75 * v)  # quick, far off
    out = tmp_path / "rows.json"
    sample = ["--calibration-blocks", "4", "--seed", "6", "--clips", "2", "--no-kernels"]
    asked = ["--targets", "0.5", "fast", "--commit", "c0", "--called", "dit of seed 9"]
    main(["--data", "dit", "--weights", str(weights), "--out", str(out), *asked, *sample, *GRID])
    rows = read(out)
    assert [row["target"] for row in rows] == [0.1, 0.5], "and no row of a density"
    for row in rows:
        assert row["data"] == "dit of seed 9 clips 6-7 5x12x10"
        assert row["mode"] == "ours auto quality"
        assert row["where"] == EMULATION and row["commit"] == "c0"
        shares = [row[x] for x in ("heads_within", "calls_within", "no_worse_than_drop")]
        assert all(0 <= share <= 1 for share in shares)
        assert row["target"] / 2 < row["mean_error"] <= row["worst_mean_error"] < 2 * row["target"]
        assert row["worst_to_drop"] >= row["worst_to_drop_of_clips"] > 0
    stricter, looser = rows
    assert stricter["density"] > looser["density"] and stricter["psnr"] > looser["psnr"]


def test_the_nodes_targets_are_the_default(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(Clips, "target_row", lambda _, target, __: asked.append(target) or {})
    monkeypatch.setattr("benchmarks.quality.__main__._report", lambda *_: None)
    named = ["--data", "dit", "--weights", str(weights), "--out", str(tmp_path / "rows.json")]
    main([*named, "--targets", "--clips", "1", "--no-kernels", *GRID])
    assert asked == [0.03, 0.06, 0.1]


@pytest.mark.parametrize("more", [["--data", "dino"], ["--data", "dit", "--clips", "0"]])
def test_targets_are_for_clips(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*more, "--targets"])
    assert "--targets is for clips of dit" in capsys.readouterr().err


def test_rows_of_the_asked_layers(weights: Path) -> None:
    found = data.load(
        Namespace(
            data="dit",
            weights=weights,
            seed=1,
            layers=[1],
            grid=SIZE,
            clips=2,
            device=torch.device("cpu"),
        )
    )
    assert found.layers == 1
    assert {(call.layer.name[-1], call.place) for call in found.judged} == {("1", 0)}
    assert [len(run.judged) for run in found.runs] == [len(JUDGED_STEPS), 0]


def test_without_weights_the_command_that_makes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "none.safetensors")
    with pytest.raises(SystemExit) as stopped:
        main(["--data", "dit", "--weights", missing, "--out", str(tmp_path / "rows.json")])
    assert stopped.value.code == 1
    assert "python -m benchmarks.tiny_video_dit.train --out" in capsys.readouterr().err
    assert not (tmp_path / "rows.json").exists()

# SPDX-License-Identifier: Apache-2.0
"""From calls to rows: samples that do not overlap, budgets that hold, figures that add up."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.quality import on_gpu
from benchmarks.quality.__main__ import main
from benchmarks.quality.data import DataSet
from benchmarks.quality.judge import Call, HeadError, Sample, head_errors, psnr, summary
from benchmarks.quality.measured import Measured, WithSink
from benchmarks.quality.modes import BY_NAME, MODES, uniform
from benchmarks.quality.rows import read, write
from benchmarks.quality.study import Study, emulated
from sparge.metrics import rel_l2
from sparge.plan.budget import HeadBudget
from sparge.policy import SparsePolicy
from sparge.reference.choose import Choice, choose_blocks


def blocks(sample: Sample) -> set[int]:
    return set(sample.blocks.nonzero().flatten().tolist())


def test_judged_blocks_are_not_those_calibration_saw(video: Call) -> None:
    (seen,) = Measured.on([video], 1, blocks=4).seen
    assert len(seen) == 4
    usable = len(video.cubes.query_counts) - 1  # the exact tokens' block is no sample
    drawn = blocks(Sample.draw(video.cubes, usable - 4, seed=1, avoid=seen))
    assert not drawn & seen and 0 not in drawn
    with pytest.raises(ValueError, match="that calibration did not see"):
        Sample.draw(video.cubes, usable - 3, seed=1, avoid=seen)


def test_a_sample_names_the_tokens_in_its_blocks(video: Call) -> None:
    order = video.cubes.order
    assert order is not None
    sample = Sample.of(video.cubes, [0, 8])
    held = order.slot_token.reshape(-1)[: 128 * 9].split(128)
    expected = torch.cat([held[0], held[8]])
    assert sample.tokens.tolist() == expected[expected >= 0].tolist()


def test_rows_keep_the_asked_density_and_ours_beats_drop(video: Call) -> None:
    study = Study(DataSet("made", [video], [video]), MODES, 3, 4, seed=0)
    rows = {mode.name: study.row(mode, 0.4, emulated) for mode in MODES}
    for row in rows.values():
        assert row["density"] <= 0.4 + 1e-9
        assert 0 < row["rel_l2"] <= row["worst_rel_l2"]
    assert rows["ours auto"]["rel_l2"] < 0.7 * rows["drop"]["rel_l2"]
    assert {"as_expected", "no_worse_than_drop"} <= rows["ours auto"].keys()
    budget = study.budgets(BY_NAME["ours auto"], 0.4)[0]
    assert budget.density[0] != budget.density[1], "the heads need different densities"


def test_calibration_of_a_text_keeps_its_first_block(text: Call) -> None:
    """Its buckets are those of routing with the sink."""
    mode, candidates = BY_NAME["ours manual"], WithSink()
    scale = text.raster.operands.head_dim**-0.5

    def choose(policy: SparsePolicy, share: float) -> Choice:
        budget = HeadBudget.uniform(text.heads, share)
        return choose_blocks(text.raster, policy, budget, scale=scale, is_causal=True)

    free = choose(SparsePolicy(), 1.0)
    bucket = candidates.buckets(free.rank, free.valid)
    for index, share in enumerate(candidates.densities):
        kept = choose(mode.policy(True), share).kept
        assert torch.equal((bucket >= 0) & (bucket <= index), kept)


def test_calibration_on_too_few_calls_is_refused(video: Call) -> None:
    with pytest.raises(ValueError, match="saw 1 calls; 2"):
        Measured.on([video], 2, blocks=2)


def test_perplexity_needs_a_text(video: Call) -> None:
    study = Study(DataSet("made", [video], [video]), MODES[:1], 2, 2, seed=0)
    with pytest.raises(ValueError, match="is no text"):
        study.perplexity(MODES[0], 0.5)


def test_errors_of_known_vectors() -> None:
    truth = torch.tensor([[[3.0, -1.0], [0.0, 0.0]]])
    value = truth + torch.tensor([[[0.3, 0.0], [0.0, -0.4]]])
    (error,) = head_errors("layer", value, truth, torch.tensor([0.25]))
    assert error.name == "layer head 0" and error.density == 0.25
    assert error.rel_l1 == pytest.approx(0.7 / 4)
    assert error.rel_l2 == pytest.approx(0.5 / math.sqrt(10))
    assert error.cos == pytest.approx(10.9 / math.sqrt(10 * (3.3**2 + 1 + 0.16)))
    assert error.psnr == pytest.approx(10 * math.log10(16 / (0.25 / 4)))
    assert psnr(truth, truth) == math.inf


def test_summary_is_the_mean_and_the_worst() -> None:
    errors = [HeadError(f"h{i}", 0.2, i / 100, i / 50, 1.0, 30.0 + i) for i in range(1, 41)]
    found = summary(errors)
    assert found["rel_l1"] == pytest.approx(0.205) and found["psnr"] == pytest.approx(50.5)
    assert found["p95_rel_l1"] == pytest.approx(0.38), "two of forty are worse"
    assert (found["worst_head"], found["worst_rel_l2"]) == ("h40", 0.8)


def test_rows_of_the_same_case_give_way(tmp_path) -> None:
    path = tmp_path / "deep" / "quality.json"
    row = {"data": "d", "mode": "drop", "asked_density": 0.1, "where": "emulation", "rel_l2": 1 / 3}
    write(path, [row, row | {"mode": "sol"}])
    write(path, [row | {"rel_l2": 0.5}])
    assert [(found["mode"], found["rel_l2"]) for found in read(path)] == [
        ("drop", 0.5),
        ("sol", 0.333333),
    ]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(path, [row | {"rel_l2": math.nan}])
    assert len(read(path)) == 2


def test_the_kernels_are_asked_for_what_they_can_do() -> None:
    can = {name for name, mode in BY_NAME.items() if not on_gpu.why_not(mode, has_grid=True)}
    assert can == {"drop"}
    assert not on_gpu.why_not(BY_NAME["ours manual"], has_grid=False)


def test_the_library_and_the_emulation_agree(video: Call) -> None:
    """On a CPU `sparge.attention` is the reference, with FP16 PV; the next test has the kernels."""
    mode, sample = BY_NAME["drop"], Sample.draw(video.raster, 3, seed=2, avoid=())
    expected, density = emulated(mode, video, uniform(mode, video.heads, 0.3), sample)
    out, reached = on_gpu.attend(video, 0.3, sample, device="cpu")
    assert torch.equal(reached, density)
    assert rel_l2(out, expected) < 0.02


@pytest.mark.gpu
def test_the_kernels_and_the_emulation_agree(video: Call) -> None:
    mode, sample = BY_NAME["drop"], Sample.draw(video.raster, 3, seed=2, avoid=())
    expected, density = emulated(mode, video, uniform(mode, video.heads, 0.3), sample)
    out, reached = on_gpu.attend(video, 0.3, sample)
    assert torch.equal(reached, density)
    assert rel_l2(out, expected) < 0.02


def test_an_untrained_dit_is_said(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.safetensors")
    with pytest.raises(SystemExit) as exit:
        main(["--data", "dit", "--weights", missing, "--out", str(tmp_path / "rows.json")])
    assert exit.value.code == 1
    assert "is not trained yet" in capsys.readouterr().err
    assert not (tmp_path / "rows.json").exists()

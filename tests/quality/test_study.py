# SPDX-License-Identifier: Apache-2.0
"""Path from calls to rows: samples that do not overlap, head settings that hold, figures that add
up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from benchmarks.quality import library
from benchmarks.quality.data import DataSet
from benchmarks.quality.judge import Call, HeadError, Sample, head_errors, psnr, summary
from benchmarks.quality.measured import Measured
from benchmarks.quality.modes import BY_NAME, MODES, attend, uniform
from benchmarks.quality.rows import read, write
from benchmarks.quality.study import Study, emulated
from sparge.blocks import QUERY_BLOCK
from sparge.common.metrics import rel_l2
from sparge.head_settings import HeadBudget
from sparge.kernels.spec import Element
from sparge.tune.spread import spread_rows

EIGHT_BITS = 0.02  # relative L2 between E4M3 and FP16 for P and V


def blocks(sample: Sample) -> set[int]:
    return set(sample.blocks.nonzero().flatten().tolist())


def test_judged_blocks_are_not_those_calibration_saw(video: Call) -> None:
    seen = Measured.on([video], 1, blocks_a_call=4).seen[0]
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
    assert {row["layers"] for row in rows.values()} == {1}
    budget = study.budgets(BY_NAME["ours auto"], 0.4)[0]
    assert budget.density[0] != budget.density[1], "the heads need different densities"


def test_calibration_of_a_text_keeps_its_first_block(text: Call) -> None:
    """The errors that it measures are those of routing with the sink."""
    text = replace(text, element=Element.INT8_FP16)
    calibration = Measured.on([text], 1, blocks_a_call=len(text.raster.query_counts)).calibration
    mode, place = BY_NAME["ours auto"], 1
    share = calibration.candidates.densities[place]
    (router,) = calibration.candidates.routers
    budgets = (HeadBudget.uniform(text.heads, each, router=router) for each in (1.0, share))
    row = torch.arange(text.layer.q.shape[2])
    compared = torch.isin(row % QUERY_BLOCK, torch.tensor(spread_rows(calibration.row_step)))
    dense, sparse = (
        attend(mode, text.raster, budget, is_causal=True)[0][0][:, compared] for budget in budgets
    )
    errors = calibration.errors_and_contrasts()[0][0, :, 0, 0, place, 0]
    for error, out, truth in zip(errors.tolist(), sparse, dense, strict=True):
        assert error == pytest.approx(rel_l2(out, truth), rel=1e-3)


def test_calibration_on_too_few_calls_is_refused(video: Call) -> None:
    with pytest.raises(ValueError, match="saw 1 layers; 2"):
        Measured.on([video, video], 2, blocks_a_call=2)


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


def test_layers_are_measured_in_all_their_calls(video: Call) -> None:
    calls = [replace(video, place=place) for place in (0, 1, 0, 1)]
    measured = Measured.on(calls, 2, blocks_a_call=2)
    assert measured.calibration.samples == [4, 4]
    assert [len(measured.seen[place]) for place in (0, 1)] == [4, 4]
    data = DataSet("made", calls[:2], calls)
    study = Study(data, [BY_NAME["ours auto"]], 2, 3, seed=0)
    assert len(study.budgets(BY_NAME["ours auto"], 0.5)) == 2
    assert study.row(BY_NAME["ours auto"], 0.5, emulated)["density"] <= 0.51


def test_the_library_is_asked_for_what_it_can_do() -> None:
    assert {name for name, mode in BY_NAME.items() if library.why_not(mode)} == {"sol"}


in_the_library = pytest.mark.parametrize("name", ["drop", "ours manual", "ours residual"])


def compare(call: Call, name: str, device: str, walks: Sequence[int] = ()) -> None:
    mode = BY_NAME[name]
    layer = call.layer
    there = replace(call, layer=layer._replace(**{x: getattr(layer, x).to(device) for x in "qkv"}))
    packed = there.packed(mode.cubes)
    avoid = () if layer.grid is None else (0,)  # the exact tokens' block shows no difference
    sample = Sample.draw(packed, 3, seed=2, avoid=avoid)
    budget = uniform(mode, call.heads, 0.3)
    if walks:
        plain, _ = emulated(mode, there, budget, sample)
        budget = replace(budget, walk=torch.tensor(walks, dtype=torch.int32))
    expected, density = emulated(mode, there, budget, sample)
    for head, walk in enumerate(walks):
        changed = rel_l2(expected[head], plain[head]) > 2 * EIGHT_BITS
        assert changed == (walk > 0), "the first walk is the one without a choice"
    out, reached = library.attend_call(mode, there, budget, sample)
    assert torch.allclose(reached.mean(), density.mean().cpu())
    assert rel_l2(out, expected) < EIGHT_BITS


@in_the_library
def test_the_library_and_the_emulation_agree(call: Call, name: str) -> None:
    """`sparge.attention` is the reference on a CPU, with FP16 PV; the next test has the kernels."""
    compare(call, name, "cpu")


different_walks = pytest.mark.parametrize("walks", [(1, 1), (1, 0), (0, 1)])


@different_walks
def test_each_head_takes_its_walk(video: Call, walks: tuple[int, int]) -> None:
    compare(video, "ours auto", "cpu", walks)


@pytest.mark.gpu
@different_walks
def test_each_head_takes_its_walk_in_kernels(video: Call, walks: tuple[int, int]) -> None:
    compare(video, "ours auto", "cuda", walks)


@pytest.mark.gpu
@in_the_library
def test_the_kernels_and_the_emulation_agree(call: Call, name: str) -> None:
    compare(call, name, "cuda")

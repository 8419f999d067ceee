# SPDX-License-Identifier: Apache-2.0
"""The comparison with peers, the times in it, versions beside each other and whole runs, without a
GPU: each case is timed or named, and its row says what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparge
from benchmarks import attention, before_after, timing
from benchmarks.before_after import beside, compare, difference, load_version, overlaid
from benchmarks.cases import ranked_share
from benchmarks.comfyui_host import Sampled, Sampling
from benchmarks.comfyui_models import MODELS
from benchmarks.companions import threshold_to_skip
from benchmarks.peers import Absent, Peer, peers, working
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import (
    CLOCKS_A_MS,
    LONGEST_SLEEP,
    Allowance,
    median_ms,
    read_rows,
    write_rows,
)
from benchmarks.whole_run import node_runs, parse, timed
from sparge import TokenGrid, grid_order
from sparge.kernels import Element, all_specs
from sparge.session.candidates import kept_shares

TINY = Shape("tiny", 2, 676, 32, TokenGrid(4, 12, 13, prefix=52))
WAYS = ("PV filter", "FP16 V", "16 bits", "budgets", "budgets spread tenfold")
MODES = ["ours", *(f"ours, {way}" for way in WAYS)]


def refuses(*_: Tensor) -> Tensor:
    raise RuntimeError("no kernel for this\nand more")


def nothing(q: Tensor, *_: Tensor) -> Tensor:
    return torch.full_like(q, torch.nan)


PEERS = [
    Peer("exact", scaled_dot_product_attention),
    Peer("broken", refuses),
    Peer("wrong", nothing),
    Absent("elsewhere", "it is not installed"),
]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """The reference stands for the kernels, and a call takes 2 ms."""

    def draw(shape: Shape) -> tuple[Tensor, ...]:
        size = (1, shape.heads, shape.tokens, shape.head_dim)
        return tuple(torch.randn(size, generator=generator) for _ in "qkv")

    def median_within(work: Callable[[], object], _: float) -> tuple[float, int]:
        work()
        return 2.0, 7

    monkeypatch.setattr(attention, "draw", draw)
    monkeypatch.setattr(attention, "peers", lambda *_: PEERS)
    monkeypatch.setattr(attention, "working", lambda peer, _: peer)
    monkeypatch.setattr(attention, "with_extra_memory", lambda work: (work(), 5))
    monkeypatch.setattr(attention, "median_within", median_within)
    monkeypatch.setattr(attention, "stage_ms", lambda *_: {"attend": 1.23456})
    monkeypatch.setattr(attention, "before_attend_ms", lambda *_: 0.5)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_run_times_or_names_every_case() -> None:
    rows = list(attention.bench(TINY, [1.0, 0.3], 15.0, Allowance(1000, 20)))
    json.dumps(rows, allow_nan=False)
    absent = {
        "broken": "RuntimeError: no kernel for this",
        "wrong": "RuntimeError: its result is not finite",
        "elsewhere": "it is not installed",
    }
    named = [(row["asked_density"], row["peer"]) for row in rows]
    dense = [(1.0, name) for name in ("exact", *absent, *MODES[:-1])]
    assert named == dense + [(0.3, name) for name in ("exact", *absent, *MODES)]
    for found in rows:
        if found["peer"] in absent:
            assert found["absent"] == absent[found["peer"]]
        else:
            assert (found["ms"], found["repeats"], found["extra_mib"]) == (2.0, 7, 5)
    ours = {(r["asked_density"], r["peer"]): r for r in rows if r["peer"].startswith("ours")}
    for (asked, name), found in ours.items():
        assert found["stages"] == {"attend": 1.2346} and found["before_attend_ms"] == 0.5
        assert found["pooled_heads"] == (0.5 if "budgets" in name else 0.0)
        if asked == 1.0 or "budgets" not in name:
            assert found["rel_l2"] < 0.03, "arithmetic alone"
        assert asked - 1 / 11 < found["density"] <= 1.0, "of 11 key blocks a whole number"
    assert ours[0.3, "ours"]["drop_rel_l2"] > 0.3, "of noise, no key stands for another"


def test_the_warmed_kernels_are_those_of_the_modes() -> None:
    specs = attention.specs("sm_90a", {128})
    attends = {"attend", "attend_hopper", "attend_hopper16"}
    assert {spec.entry for spec in specs} == {"means", "quantize", "route"} | attends
    assert {s.element for s in specs if s.entry == "attend"} == {Element.INT8_FP16}
    assert all(spec.head_dim == 128 for spec in specs) and set(specs) < set(all_specs("sm_90a"))


def test_peers_that_are_not_installed_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Any:
        raise ModuleNotFoundError(f"no {name}")

    monkeypatch.setattr("importlib.import_module", fails)
    found = [peer for peer in peers(0.2, 128) if isinstance(peer, Absent)]
    named = [(peer.name, peer.reason[:21]) for peer in found]
    assert named == [("comfy-kitchen sol_attn", "ModuleNotFoundError: ")]
    assert [working(peer, 64) for peer in found] == found


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_rows_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    for rows in ([{"a": 1, "b": None}, {"a": 2.5, "b": "x, y"}], []):
        write_rows(tmp_path / name, rows)
        assert read_rows(tmp_path / name) == rows
    with pytest.raises(ValueError, match="JSON"):
        write_rows(tmp_path / name, [{"a": float("nan")}])


@pytest.mark.parametrize("name", SHAPES)
def test_a_call_keeps_the_density_that_is_asked_for(name: str) -> None:
    """But for half a step of attend, and with text and a step at least."""
    order = grid_order(SHAPES[name].grid)
    for density in (0.1, 0.5, 1.0):
        kept = kept_shares(order, [int(ranked_share(order, density) * order.key_blocks), 1])
        near = 0.0 if density == 1 else 1.001 / order.key_blocks
        assert kept[0] == pytest.approx(max(density, kept[1]), abs=near)


class Machine:
    """A host and the stream of a GPU, each with the ms at which it has done all it was given."""

    host = gpu = slept = 0.0

    def call(self, gpu_ms: float, host_ms: float) -> Callable[[], None]:
        def work() -> None:
            self.host += host_ms
            self.queue(gpu_ms)

        return work

    def queue(self, ms: float) -> None:
        self.gpu = max(self.gpu, self.host) + ms

    def sleep(self, clocks: int) -> None:
        self.slept += clocks / CLOCKS_A_MS
        self.queue(clocks / CLOCKS_A_MS)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        found = SimpleNamespace(at=0.0, query=lambda: found.at <= self.host)

        def record() -> None:
            self.queue(0.0)
            found.at = self.gpu

        found.record, found.elapsed_time = record, lambda end: end.at - found.at
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    clock = SimpleNamespace(perf_counter=lambda: found.host / 1000)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "_sleep", found.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def test_short_calls_are_queued_behind_a_sleep(machine: Machine) -> None:
    for repeats in (1, 20):
        machine.slept = 0.0
        assert median_ms(machine.call(0.25, 0.3), repeats) == pytest.approx(0.25)
    assert 0 < machine.slept <= LONGEST_SLEEP
    machine.host = machine.gpu
    assert median_ms(machine.call(0.25, 0.3), repeats, with_host=True) > 0.29


def test_long_calls_are_not_slept_for(machine: Machine) -> None:
    assert median_ms(machine.call(10.0, 0.3), 3) == pytest.approx(10.0)
    median_ms(machine.call(0.1, 6.0), 10)
    assert machine.slept == 0, "less than what the host takes would not do"


def test_an_overlay_is_a_version_of_its_own(tmp_path: Path, monkeypatch) -> None:
    overlay = tmp_path / "faster_route"
    overlay.mkdir()
    (overlay / "route.cu").write_text("// another")
    copied = overlaid(overlay, tmp_path / "versions")
    assert (copied / "csrc" / "route.cu").read_text() == "// another"
    assert (copied / "csrc" / "means.cu").is_file()
    other = load_version(copied)
    assert other.__name__ == "faster_route" and other.attention is not sparge.attention
    draw = before_after.draw
    monkeypatch.setattr(before_after, "draw", lambda shape: draw(shape, "cpu"))
    monkeypatch.setattr(before_after, "stage_ms", lambda work, calls, library: {"attend": 1.5})
    times = cycle([2.0, 4.0])  # this version is timed first in even rounds, the base in odd ones
    shape = Shape("tiny", 2, 256, 64, TokenGrid(2, 8, 16))
    rows = list(compare([other, sparge], shape, [0.5], 4, lambda work: next(times)))
    assert [row["way"] for row in rows] == list(before_after.WAYS)
    assert all(row["equal"] and row["attend_ms"] == 1.5 for row in rows)


def test_differences_are_of_bits_and_of_numbers() -> None:
    one = torch.tensor([1.0, math.inf, math.nan])
    assert difference(one, one.clone()) == (True, 0.0)
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])) == (False, 0.0)
    assert difference(torch.tensor([1.5]), torch.tensor([1.0])) == (False, 0.5)
    assert difference(torch.tensor([math.nan]), torch.tensor([1.0])) == (False, math.inf)
    found = {"base_ms": 2.0, "ms": 1.0, "gain": 1.0, "spread": 0.0}
    assert beside([2.0, 2.2, 2.0], [1.0, 1.1, 1.0]) == found


def test_runs_are_named_by_their_widgets() -> None:
    named = ["--mode", "manual", "--topk", "0.5", "0.2", "--start-percent", "0"]
    dense, _, run = node_runs(parse(named))
    wanted = {"mode": "manual", "topk": 0.2, "pvthreshd": 50.0, "start_percent": 0.0}
    assert (dense.name, dense.widgets) == ("default", None)
    assert (run.name, run.widgets) == ("topk 0.2, pvthreshd 50", wanted) and not run.may_stay_dense
    named = ["--topk", "0.5", "--quality", "high", "--start-percent", "0.2"]
    _, run = node_runs(parse(["--mode", "auto quality", *named]))
    assert run.name == "auto quality, high" and run.widgets and "topk" not in run.widgets
    assert run.may_stay_dense and run.widgets["start_percent"] == 0.2


def test_of_two_runs_the_second_counts() -> None:
    first, second = (
        Sampled(seconds, sum(seconds) + 1, torch.empty(0), torch.empty(0), 1.0, 2.0)
        for seconds in ([9.0, 8.0, 7.0], [5.0, 3.0, 2.0])
    )
    found = timed([first, second], Sampling(3))
    assert (found["seconds_per_call"], found["run_seconds"]) == (2.5, 11.0)
    assert (found["first_run_seconds"], found["first_wall_seconds"]) == ([9.0, 8.0, 7.0], 25.0)
    assert "first_run_seconds" not in timed([first], Sampling(3))


def test_steps_that_were_not_taken_count_as_long_as_sparse_ones_on_average() -> None:
    two_calls_a_step = [5.0, 5.0, 4.0, 2.0, 2.0, 1.0]
    sampled = Sampled(two_calls_a_step, 20.0, torch.empty(0), torch.empty(0), 1.0, 2.0)
    found = timed([sampled], Sampling(20, only_first=3), dense_steps=1)
    assert (found["run_seconds"], found["sampled_seconds"]) == (20 + 17 * 4.5, 20)
    expected = "3 of 20 steps, the others as long as those after 1 are on average"
    assert found["extrapolated"] == expected


def test_models_in_a_row_share_the_steps() -> None:
    assert Sampling(20).parts(2) == [(0, 10), (10, 20)]
    assert Sampling(20, only_first=7).parts(1) == [(0, 7)]


def test_a_threshold_is_found_for_a_number_of_steps() -> None:
    found = threshold_to_skip(7, lambda threshold: int(10 * threshold))
    assert 0.7 <= found < 0.8


def test_tiny_models_keep_their_channels() -> None:
    for name, model in MODELS.items():
        tiny = model.made_tiny()
        assert model.name == name and tiny.latent[0] == model.latent[0]
        assert tiny.config.keys() == model.config.keys() and len(tiny.latent) == len(model.latent)

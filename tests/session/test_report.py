# SPDX-License-Identifier: Apache-2.0
"""Reports: seconds by backend, errors by weight, and the words of a verdict."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparge.reasons import LINES, Reason
from sparge.session import Aim, Call, Report, details, summary, verdict
from sparge.session import report as module
from sparge.session.heads import MEASURING
from sparge.session.report import Counts, Densities, MeasuredHeads, PassRecord, RunTime, Span
from sparge.session.timing import Backend
from sparge.stats import Counter as Pairs

ROOT = Path(__file__).resolve().parents[2]
GPU, NAN = torch.device("cuda", 0), float("nan")
EXACT, EIGHT, SPARSE, MEASURED = Backend


@dataclass
class Mark:
    """Stands for an event."""

    seconds: float = 0.0

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Mark) -> float:
        return 1000 * (end.seconds - self.seconds)


def record(
    step: int, *spans: tuple[Backend, float], tokens: int = 256, foretold=None
) -> PassRecord:
    key = (1, 2, tokens, 64), GPU
    made = [Span(by, key, foretold, Mark(1.0), Mark(1.0 + seconds)) for by, seconds in spans]
    return PassRecord(step, torch.device("cpu"), spans=made)


def test_seconds_by_backend_and_step() -> None:
    first = record(0, (EXACT, 4.0), (EXACT, 3.0), (MEASURED, 0.5))
    found = RunTime.of([first, record(1, (EIGHT, 2.0)), record(1, (SPARSE, 0.5), (SPARSE, 0.25))])
    assert found.line() == (
        "Seconds of attention, in all and by step: exact 7 (7 0); 8-bit dense 2 (0 2); "
        "sparse 0.75 (0 0.75); measuring 0.5 (0.5 0)."
    )
    assert found.saved == pytest.approx(3 * 3.0 - 2.75 - 0.5)


@pytest.mark.parametrize(
    ("of_sparse", "saved"),
    [
        ({"tokens": 128, "foretold": 2.0}, 1.5),
        ({"tokens": 128}, None),
        ({"foretold": 2.0}, 2.5),  # the run knows better
        (None, None),
    ],
)
def test_what_no_exact_call_tells_is_foretold(of_sparse, saved) -> None:
    records = [record(0, (EXACT, 3.0), foretold=4.0)]
    records += [] if of_sparse is None else [record(1, (SPARSE, 0.5), **of_sparse)]
    found = RunTime.of(records)
    assert found.saved == (saved and pytest.approx(saved))
    assert RunTime.of([]).line() == "" and RunTime.of([]).saved is None


def test_what_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What raises, what a CUDA graph records, calls of other keys, and other devices."""

    class Event(Mark):
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.seconds = 1.0

    recorded = False
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(module, "raw_stream", lambda index: 0)
    monkeypatch.setattr(module, "being_recorded", lambda device: recorded)
    on_gpu, on_cpu = (PassRecord(0, torch.device(each)) for each in ("cuda:0", "cpu"))
    q, k = torch.zeros(1, 2, 128, 64), torch.zeros(1, 2, 256, 64)
    for found in (on_gpu, on_cpu):
        with pytest.raises(ZeroDivisionError), found.timed(SPARSE, Call(q, q, q), None):
            raise ZeroDivisionError
        for call in (Call(q, q, q), Call(q, k, k)):
            with found.timed(SPARSE, call, None):
                pass
    recorded = True
    with on_gpu.timed(SPARSE, Call(q, q, q), None):
        pass
    assert len(on_gpu.spans) == 1 and on_cpu.spans == []


def test_densities_are_of_all_calls_of_all_passes() -> None:
    """Of two prompts in each step, more layers than were expected, and calls of no layer."""
    records = []
    for step in range(2):
        for _prompt in range(2):
            made = PassRecord(step, torch.device("cpu"))
            if step == 1:
                made.expect(2)
                made.stats_of(0).counters[[Pairs.KEPT, Pairs.VALID]] = torch.tensor([25, 100])
                made.stats_of(5).counters[[Pairs.KEPT, Pairs.VALID]] = torch.tensor([50, 100])
                assert made.rows >= 6 and made.last_row == 5
            made.add_dense(0 if step == 0 else 7, 100)
            made.add_dense(None, 50)
            records.append(made)
    assert [each.last_row for each in records] == [0, 0, 5, 5]
    found = Densities.of(records)
    assert found.layers.tolist() == [0, 5, 7]
    assert found.of_sparse_calls == 150 / 400 and found.overall == (150 + 600) / (400 + 600)
    assert found.of_steps.tolist() == [1.0, pytest.approx(225 / 350)]
    by_step = found.by_step.nan_to_num(-1.0)
    assert by_step.tolist() == [[1.0, 0.25], [-1.0, 0.5], [-1.0, 1.0]]
    nothing = Densities.of([])
    assert (nothing.overall, nothing.of_sparse_calls, len(nothing.of_steps)) == (1, 1, 0)


@pytest.mark.parametrize("looked_at", [None, 3])
def test_nan_is_looked_for_in_one_result_of_a_pass(looked_at: int | None) -> None:
    made = PassRecord(0, torch.device("cpu"), looked_at=looked_at)
    for row, value in ((1, 1.0), (3, NAN), (1, NAN)):
        made.look(row, torch.tensor([0.0, value, 5.0]))
    assert made.has_nan == (looked_at == 3)


HEADS = MeasuredHeads(
    44776,
    [0, 7],
    density=torch.tensor([[0.05, 0.2], [0.3, 1.0]]),
    expected=torch.tensor([[0.05, 0.07], [0.02, 0.0]]),
    found=torch.full((2, 2), NAN),
    weight=torch.tensor([[0.2, 1.8], [1.0, 1.0]]),
)


BEFORE = Reason("before start_percent 0.2", "before")


def report_of(heads=(), aim=None, saved=None, reasons=None, **given) -> Report:
    """A run of three steps and two layers."""
    of_run = {x: given.pop(x) for x in ("stopped", "notes", "seconds", "steps") if x in given}
    by_step = torch.tensor([[1.0, 0.5, 0.25], [1.0, NAN, 0.75]])
    densities = Densities(0.44, 0.25, by_step.nanmean(0), by_step, torch.tensor([0, 7]))
    reasons = Counter({BEFORE: 1} if reasons is None else reasons)
    facts: Any = {"family": "Mochi", "tokens": 44776, "sparse": 3, "cross": 4, "passes": 3} | given
    counts = Counts(reasons=reasons, **facts)
    return Report(counts, aim, densities, heads, RunTime({}, saved), **of_run)


def test_a_line_for_the_log() -> None:
    assert summary(report_of()) == (
        "Mochi, 44,776 tokens; 3 sparse and 1 dense self-attention calls, 44.0 % of attention "
        "computed; density of sparse calls 25.0 %; dense because: before start_percent 0.2 (1); "
        "4 cross-attention calls (always exact)"
    )
    fast = report_of(
        saved=57.0, seconds=34.0, eight_bit=2, filter_left_out=True, notes=(Reason("n."),)
    )
    assert summary(fast).startswith("Speedup 2.7x: 34 s, not 91 s; Mochi")
    assert "; 2 dense calls in 8 bits, faster here than exact ones; dense because: " in summary(
        fast
    )
    left_out = "pvthreshd left out: without it this GPU is faster and closer to the original"
    assert summary(fast).endswith(f"{left_out}; n")
    assert "Speedup" not in summary(replace(fast, stopped=True)), "who knows"


def test_errors_count_by_head_weight_found_ones_first() -> None:
    """And silent heads have no mean."""
    found = report_of((HEADS,), Aim("quality", 0.06))
    assert found.error == pytest.approx((0.2 * 0.05 + 1.8 * 0.07 + 0.02) / 4)
    lines = details(found).splitlines()
    assert "density of sparse calls 25.0 % (heads 5.0 % to 100.0 %)" in lines[0]
    assert lines[0] == summary(found) and "; error 0.039" in lines[0]
    assert lines[1:3] == ["Asked for a mean error of 0.06.", "Density by step, %: 100 50 50."]
    told = [" ".join(line.split()) for line in lines[-2:]]
    assert told == ["0 12.5 % (5.0 % to 20.0 %) 0.068 -", "7 65.0 % (30.0 % to 100.0 %) 0.010 -"]
    again = replace(HEADS, found=torch.tensor([[0.1, 0.2], [NAN, NAN]]))
    assert report_of((HEADS, again)).error == pytest.approx((0.2 * 0.1 + 1.8 * 0.2) / 2)
    loud = replace(HEADS, expected=torch.full((2, 2), 0.3), weight=torch.full((2, 2), 3.0))
    assert report_of((HEADS, loud)).error == pytest.approx((0.156 + 3.6) / 16)
    silent = report_of((replace(HEADS, weight=torch.zeros(2, 2)),))
    assert silent.error is None and details(silent).splitlines()[-1].split()[-2:] == ["-", "-"]


SHARE = "44 % of attention computed"
FAST = "Speedup 2.7x: 34 s, not 91 s"
OLD = Reason("GeForce RTX 2080 Ti is too old: it has compute capability 7.5", "old GPU")
SMALL = Reason("fewer than min_tokens (4096) tokens", "small", 4096)
GONE = {"sparse": 0, "saved": None}
NOTES = (Reason("the results do not add up, remove one of the two nodes", "core"), Reason("more"))
LARGER = "Render larger or longer, or lower min_tokens"
LOWER = "Lower start_percent, or take more steps"
ABSENT = GONE | {"cross": 0, "reasons": {}}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, [FAST, SHARE]),
        ({"heads": (HEADS,)}, [FAST, f"{SHARE}, off by 4 %"]),
        ({"seconds": 2.93, "saved": 0.53}, ["Speedup 1.2x: 2.9 s, not 3.5 s", SHARE]),
        ({"seconds": 1200.0, "saved": 1800.0}, ["Speedup 2.5x: 20 min, not 50 min", SHARE]),
        ({"saved": -2.0}, ["As fast as without: 34 s", SHARE]),
        ({"saved": None}, ["3 of 4 calls were sparse", SHARE]),
        ({"notes": NOTES}, [FAST, "Remove Model Sparse Attention, or this node",
                            "The results do not add up, remove one of the two nodes."]),
        (GONE, ["no step after start_percent", LOWER, "All steps come before start_percent 0.2."]),
        (GONE | {"steps": 1, "aim": Aim("budget", 0.2)},
         ["the run has one step", "Set mode to manual and start_percent to 0",
          "All steps come before start_percent 0.2."]),
        (GONE | {"steps": 1, "reasons": {MEASURING: 2}},
         ["measuring took all the steps", "Take more steps, or set mode to manual", "Measuring."]),
        (GONE | {"reasons": {OLD: 2}}, ["this GPU is too old", LINES["old GPU"][1], f"{OLD}."]),
        (GONE | {"reasons": {BEFORE: 1, SMALL: 7}, "tokens_of": {BEFORE: 4096, SMALL: 1024}},
         ["no step after start_percent", LOWER, "All steps come before start_percent 0.2."]),
        (GONE | {"reasons": {BEFORE: 1, SMALL: 7}, "tokens_of": {BEFORE: 77, SMALL: 192}},
         ["too small (192 of 4096)", LARGER, "Fewer than min_tokens (4096) tokens."]),
        ({"sparse": 0, "saved": 7.0, "eight_bit": 1},
         ["Speedup 1.2x: 34 s, not 41 s", "no step after start_percent",
          "All steps come before start_percent 0.2."]),
        (ABSENT | {"passes": 0},
         ["the model did not run", "Connect the model to the sampler that runs",
          "The model did not run."]),
        (ABSENT, ["no attention came to this node", "Put it last, before the sampler",
                  "No attention call came."]),
        (ABSENT | {"notes": NOTES}, ["Model Sparse Attention wins", LINES["core"][1],
                                     "The results do not add up, remove one of the two nodes."]),
        (GONE | {"reasons": {}}, ["only text or sound came here", "Put it last, before the sampler",
                                  "All attention calls were cross-attention."]),
        (GONE | {"finished": 1},
         ["another node took its place", "Remove other attention nodes, or put it last", "..."]),
        (GONE | {"stopped": True}, ["it was stopped too early", "Let it run to its end",
                                    "Stopped before the first sparse step."]),
        ({"stopped": True}, ["Stopped early", SHARE]),
    ],
)  # fmt: skip
def test_two_lines_for_the_box_of_a_node_and_a_sentence(changes, lines: list[str]) -> None:
    """A run that skipped nothing says so in its first line or its second."""
    found = verdict(report_of(**{"seconds": 34.0, "saved": 57.0} | changes))
    told = [line.removeprefix("Nothing skipped: ") for line in found]
    assert told == lines or (lines[-1] == "..." and told[:2] == lines[:2])
    assert (told != found) == (changes.get("sparse") == 0)
    assert all(len(line) <= WIDEST for line in found[:2])


#: Characters that either UI shows of a line.
WIDEST = 48


@pytest.mark.parametrize("kind", LINES)
def test_no_kind_of_reason_is_cut(kind: str) -> None:
    """With numbers of tokens as large as min_tokens may be."""
    what, remedy, sentence = Reason("why it is so", kind, 1 << 20).lines(tokens=1 << 20)
    assert what.startswith("Nothing skipped: ") and len(what) <= WIDEST >= len(remedy) > 0
    assert sentence == "Why it is so."
    assert "clip" not in what + remedy


#: Places of the kind among arguments.
KIND_OF = {"Reason": 1, "Unsupported": 1, "_unusable": 0}
#: Code whose refusals no run in ComfyUI meets: of Python's own loops and pipelines.
OF_PYTHON = ("sparge/compat/", "sparge/integrations/", "sparge/call.py", "sparge/padding.py")
#: Beginnings of what may go without a kind: those of such code, and what has another's.
WITHOUT = (
    *("*error.args", "*refusal.args", "*self._error.args", "capability.reason", ""),
    *("cross-attention", "attention beside the model's", "queries and keys differ in number"),
    *("one of the first", "the model has fewer layers", "The call has", "v has head_dim"),
    *("output_dtype", "is_causal", "key_lengths", "block_mask", "The candidates have"),
)


def test_every_reason_has_a_kind() -> None:
    """Each has one of the table, and each of the table is used."""
    texts, without = set(), []
    for path in sorted([*(ROOT / "sparge").rglob("*.py"), *(ROOT / "nodes").glob("*.py")]):
        name = path.relative_to(ROOT).as_posix()
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(each, ast.Constant) and path.stem != "reasons":
                texts.add(each.value)
            place = KIND_OF.get(getattr(getattr(each, "func", None), "id", ""))
            if place is None or name.startswith(OF_PYTHON):
                continue
            assert isinstance(each, ast.Call)
            kind = each.args[place] if len(each.args) > place else None
            if kind is None or (isinstance(kind, ast.Constant) and kind.value not in LINES):
                without.append(ast.unparse(each.args[0]).removeprefix("f").strip("'\""))
    assert {*LINES} - texts == {"other"}
    assert [x for x in without if not x.startswith(WITHOUT[5:]) and x not in WITHOUT] == []


def test_a_report_is_text() -> None:
    found = report_of(
        (HEADS,), Aim("budget", 0.25), reasons={Reason("two."): 2}, notes=(Reason("mind."),)
    )
    assert str(found).splitlines() == [
        "44.0% of attention was computed; sparse calls kept 25.0% of their pairs, for a mean "
        "density of 25 %.",
        "mind.",
        "2 calls were dense: two.",
    ]  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""The line of a run in the log, in the report and on the node, and the picture of it."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def report(load_pack):
    return load_pack("sparge.session.verdict")


@pytest.fixture
def result(load_pack):
    """result(...) of a manual run of three steps and two layers, with these changes."""

    def make(aim=None, by_step=None, heads=(), saved=None, is_foretold=True, **changes):
        report, layers = load_pack("sparge.session.report"), torch.tensor([0, 7])
        if by_step is None:
            by_step = torch.tensor([[1.0, 0.5, 0.25], [1.0, float("nan"), 0.75]])
        else:
            layers = torch.arange(len(by_step))
        of_run = {x: changes.pop(x) for x in ("stopped", "notes", "seconds") if x in changes}
        facts = {
            "family": "Mochi", "tokens": 44776, "sparse": 3, "cross": 4, "passes": 3,
            "reasons": {"before start_percent 0.2": 1},
        } | changes  # fmt: skip
        counts = report.Counts(**facts | {"reasons": Counter(facts["reasons"])})
        densities = report.Densities(0.44, 0.25, by_step.nanmean(0), by_step, layers)
        time, words = report.RunTime({}, saved, is_foretold), load_pack("nodes.run").WORDS
        return report.Report(counts, aim, densities, heads, time, words, **of_run)

    return make


@pytest.fixture
def measured(load_pack, result):
    session = load_pack("sparge.session")
    heads = load_pack("sparge.session.report").MeasuredHeads(
        tokens=44776,
        layers=(0, 7),
        density=torch.tensor([[0.05, 0.2], [0.3, 1.0]]),
        expected=torch.tensor([[0.05, 0.07], [0.02, 0.0]]),
        found=torch.full((2, 2), torch.nan),
        weight=torch.tensor([[0.2, 1.8], [1.0, 1.0]]),
        pool_weight=torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        order_kinds={kind: 3 - place for place, kind in enumerate(load_pack("sparge").OrderKind)},
    )
    return result(aim=session.Aim("quality", 0.06), heads=(heads,))


@pytest.fixture
def published(load_pack, caplog):
    """published(result, node): the record in the log."""

    def of(result, node=None):
        with caplog.at_level(logging.INFO, "sparge"):
            load_pack("nodes.comfyui").publish(result, node)
        (record,) = caplog.records
        return record

    return of


def test_a_good_run(result, published):
    record = published(result())
    assert record.levelno == logging.INFO
    assert record.message == (
        "[Sparge] Mochi, 44,776 tokens; 3 sparse and 1 dense self-attention calls, 44.0 % of "
        "attention computed; density of sparse calls 25.0 %; dense because: before start_percent "
        "0.2 (1); 4 cross-attention calls (always exact)"
    )


@pytest.mark.parametrize(
    ("saved", "is_foretold", "told"),
    [
        (57.0, True, "by calls that were timed before this run"),
        (57.0, False, "by exact calls of this run"),
        (None, True, ""),
        (-1.0, True, "by calls that were timed before this run"),
    ],
)
def test_the_saving_is_told_first(result, report, saved, is_foretold, told):
    found = result(saved=saved, is_foretold=is_foretold, seconds=34.0)
    first = report.summary(found).split("; ")[0]
    faster = "2.7x faster: 34 s, not 91 s" if saved == 57 else "As fast as without: 34 s"
    assert first == (faster if told else "Mochi, 44,776 tokens")
    assert told in report.details(found).splitlines()[-1]
    assert "faster" not in report.summary(replace(found, stopped=True)), "who knows"


def test_what_else_is_told(result, report):
    told = report.summary(result(eight_bit=2))
    assert "; 2 dense calls in 8 bits, faster here than exact ones; dense because: " in told
    told = report.summary(result(filter_left_out=True))
    assert told.endswith("; pvthreshd left out: this GPU is faster and truer without it")


def test_measured_heads_are_told(measured, report):
    line = report.summary(measured)
    assert "density of sparse calls 25.0 % (heads 5.0 % to 100.0 %)" in line
    assert "; error 0.039" in line and "token order" not in line
    details = report.details(measured).splitlines()
    assert details[:5] == [
        line,
        "Asked for a mean error of 0.06.",
        "25 % of 4 heads use pooled keys.",
        "Blocks of tokens by head: cubes in 3, rows in 2.",
        "Density by step, %: 100 50 50.",
    ]
    first, second = (" ".join(line.split()) for line in details[-2:])
    assert first == "0 12.5 % (5.0 % to 20.0 %) 0.068 -"
    assert second == "7 65.0 % (30.0 % to 100.0 %) 0.010 -"


def test_errors_that_were_found_count_before_those_expected(measured, report):
    """Of the heads that were measured again, by their weights."""
    (heads,) = measured.heads
    found = torch.tensor([[0.1, 0.2], [torch.nan, torch.nan]])
    result = replace(measured, heads=(replace(heads, found=found),))
    assert "; error 0.190" in report.summary(result)
    assert report.verdict(result).endswith("error 19 %")
    first, second = (line.split()[-2:] for line in report.details(result).splitlines()[-2:])
    assert (first, second) == (["0.068", "0.190"], ["0.010", "-"])


@pytest.mark.parametrize(
    ("head", "line", "layer", "bar"),
    [
        (0, "; error 0.044", "0.078", 0.078),
        (1, "; error 0.084", "0.158", 0.158),
    ],
    ids=["a quiet head", "a loud head"],
)
def test_errors_count_by_head_weight(measured, report, head, line, layer, bar):
    """One of the heads errs by .1 more."""
    (heads,) = measured.heads
    off = torch.zeros(2, 2)
    off[0, head] = 0.1
    result = replace(measured, heads=(replace(heads, expected=heads.expected + off),))
    assert line in report.summary(result)
    first, second = report.details(result).splitlines()[-2:]
    assert first.split("%)")[1].split() == [layer, "-"]
    assert second.split("%)")[1].split() == ["0.010", "-"], "layer 7 has nothing to do with it"
    assert result.errors_by_layer() == pytest.approx({0: bar, 7: 0.01})


def test_heads_of_two_shapes_count_by_head_weight(measured, report):
    (heads,) = measured.heads
    other = replace(heads, expected=torch.full((2, 2), 0.3), weight=torch.full((2, 2), 3.0))
    result = replace(measured, heads=(heads, other))
    assert "; error 0.235;" in report.summary(result)
    expected = {0: (0.136 + 1.8) / 8, 7: (0.02 + 1.8) / 8}
    assert result.errors_by_layer() == pytest.approx(expected)


def test_heads_that_count_nothing_have_no_mean(measured, report, picture):
    (heads,) = measured.heads
    silent = replace(measured, heads=(replace(heads, weight=torch.zeros(2, 2)),))
    assert "error" not in report.summary(silent)
    assert report.details(silent).splitlines()[-1].split()[-1] == "-"
    assert shades(picture.draw(silent), picture.PREDICTED) == 0


@pytest.mark.parametrize(
    ("changes", "words", "end"),
    [
        (
            {"sparse": 0, "cross": 0, "reasons": {"attention mask": 2}},
            "NOTHING WAS SPARSE",
            "dense because: attention mask (2)",
        ),
        (
            {"sparse": 0, "cross": 0, "reasons": {}},
            "NOTHING WAS SPARSE: no attention call reached this node",
            "",
        ),
        ({"sparse": 0, "reasons": {}, "passes": 0}, "NOTHING WAS SPARSE: the model did not", ""),
        ({"notes": ("remove one.",)}, "3 sparse", "; remove one"),
    ],
    ids=["reasons", "no call", "no pass", "a note"],
)
def test_what_the_user_has_to_know_is_a_warning(result, published, changes, words, end):
    record = published(result(**changes))
    assert record.levelno == logging.WARNING
    assert words in record.message and record.message.endswith(end)


def test_whoever_stops_a_run_is_not_warned(result, published):
    record = published(result(sparse=0, stopped=True))
    assert record.levelno == logging.INFO
    assert record.message.startswith("[Sparge] stopped before the first sparse step; Mochi")


def test_one_line_in_the_log_and_the_verdict_on_the_node(result, published, monkeypatch):
    """The nodes that hold a subgraph show the text of a node in it, too."""
    shown = []
    server = SimpleNamespace(send_progress_text=lambda text, node: shown.append((node, text)))
    module = SimpleNamespace(PromptServer=SimpleNamespace(instance=server))
    monkeypatch.setitem(sys.modules, "server", module)
    record = published(result(stopped=True), "12:3:7")
    said = "Stopped early.\n44 % of attention computed"
    assert shown == [("12", said), ("12:3", said), ("12:3:7", said)]
    assert record.message.endswith("stopped early") and "\n" not in record.message


def test_notes_appear_once(load_pack):
    sampling = SimpleNamespace(percent_to_sigma=lambda percent: 1 - percent)
    run = load_pack("nodes.run").Run(load_pack("sparge.session").Settings(), sampling, None)
    run.note("remove one")
    run.note("remove one")
    assert run.report().notes == ("remove one",)


SHARE = "44 % of attention computed"
TOO_OLD = "GeForce RTX 2080 Ti is too old: it has compute capability 7.5"
OLD = "GeForce RTX 2080 Ti is too old: it ..."
NO_GPU = "The CPU is not supported: the kernels are NVIDIA machine code."
NONE = "The CPU is not supported: the ..."
WARNED = ("the results do not add up, remove one of the two nodes", "more")
UNREACHED = ["No attention call reached this node", "Put it last, before the sampler"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["2.7x faster: 34 s, not 91 s", SHARE]),
        ({"seconds": 2.93, "saved": 0.53}, ["1.2x faster: 2.9 s, not 3.5 s", SHARE]),
        ({"seconds": 1200.0, "saved": 1800.0}, ["2.5x faster: 20 min, not 50 min", SHARE]),
        ({"saved": -2.0}, ["As fast as without: 34 s", SHARE]),
        ({"saved": None}, ["3 of 4 calls were sparse", SHARE]),
        (
            {"notes": WARNED},
            ["2.7x faster: 34 s, not 91 s", "the results do not add up, remove ..."],
        ),
        ({"sparse": 0, "saved": None}, ["NOTHING WAS SPARSE", "before start_percent 0.2"]),
        (
            {"sparse": 0, "saved": 7.0, "eight_bit": 1},
            ["1.2x faster: 34 s, not 41 s", "Nothing skipped, calls in 8 bits"],
        ),
        ({"sparse": 0, "passes": 0, "reasons": {}}, ["The model did not run"]),
        ({"sparse": 0, "cross": 0, "reasons": {}}, UNREACHED),
        ({"sparse": 0, "stopped": True}, ["Stopped before the first sparse step"]),
        (
            {"sparse": 0, "stopped": True, "may_have_been_sparse": True},
            ["Stopped early", "before start_percent 0.2"],
        ),
        (
            {"sparse": 0, "cross": 0, "reasons": {}, "stopped": True, "notes": WARNED},
            ["Stopped before the first sparse step"],
        ),
        ({"sparse": 0, "saved": None, "reasons": {TOO_OLD: 2}}, ["NOTHING WAS SPARSE", OLD]),
        ({"sparse": 0, "saved": None, "reasons": {NO_GPU: 2}}, ["NOTHING WAS SPARSE", NONE]),
    ],
)
def test_the_two_lines_on_the_node(load_pack, result, changes, expected):
    found = result(**{"seconds": 34.0, "saved": 57.0} | changes)
    assert load_pack("sparge.session").verdict(found).split("\n") == expected


def test_the_verdict_says_how_near_it_is(load_pack, measured):
    verdict = load_pack("sparge.session").verdict
    assert verdict(measured).split("\n")[1] == f"{SHARE}, error 4 %"


@pytest.fixture
def picture(load_pack):
    return load_pack("nodes.picture")


def shades(image, colour):
    """Points of that colour."""
    return int(((255 * image).round() == torch.as_tensor(colour)).all(-1).sum())


def inked(image):
    """Points of letters, which are smooth."""
    return int((image.amin(-1) > 0.5).sum())


def test_the_picture_shows_densities_and_errors(picture, measured):
    image = picture.draw(measured)
    assert image.ndim == 4 and image.shape[0] == 1 and image.shape[-1] == 3
    assert image.dtype == torch.float32
    assert float(image.mean()) < 0.4, "dark, as the nodes around it"
    tall = picture.TALLEST_CELL
    wide = (image.shape[2] - picture.RIGHT - picture.ERROR_WIDTH - picture.GAP - picture.LEFT) / 3
    for row, column, density in [(0, 0, 1.0), (0, 1, 0.5), (0, 2, 0.25), (1, 2, 0.75), (1, 1, -1)]:
        at = picture.TOP + round((row + 0.5) * tall), picture.LEFT + round((column + 0.5) * wide)
        colour = picture.coloured(torch.tensor(density)) if density > 0 else picture.EMPTY
        assert torch.equal((255 * image[0][at]).round(), torch.as_tensor(colour).float())
    assert shades(image, picture.PREDICTED) > 0


def test_the_picture_says_what_it_shows(picture, measured, monkeypatch):
    """In letters that half the width leaves legible."""
    words, write = {}, picture.write

    def listen(image, text, top, left, colour=None, size=picture.NUMBER, before=0.0):
        words[text] = size
        write(image, text, top, left, size=size, before=before)

    monkeypatch.setattr(picture, "write", listen)
    picture.draw(measured)
    headline = "3 of 4 calls were sparse"
    told = {headline, "skipped", "computed", "layer", "step", "error"}
    assert told <= words.keys() and min(words.values()) >= 22
    assert max(words, key=lambda text: words[text]) == headline
    assert {"1", "2", "3", "0", "7"} <= words.keys(), "numbers of steps and layers"


def test_no_head_measured_and_nothing_run(picture, result):
    image = picture.draw(result())
    assert shades(image, picture.PREDICTED) == 0 and inked(image) > 100
    assert inked(picture.draw(result(by_step=torch.empty(0, 3)))) > 100


@pytest.mark.parametrize(("layers", "steps"), [(1, 1), (60, 50), (200, 1000)])
def test_pictures_of_any_size(picture, result, layers, steps):
    image = picture.draw(result(by_step=torch.rand(layers, steps)))
    assert image.shape[1] <= 800 and image.shape[2] == 800


@pytest.fixture
def ran(load_pack, patch, result):
    """ran(result): what the report node gives and shows of a run."""
    node = load_pack("nodes.sparge_report").SpargeAttentionReport

    def of(found, monkeypatch):
        patched, shown = patch(), {}
        load_pack("nodes.hook").hook_of(patched).last = found
        io = sys.modules["comfy_api.latest"].io
        monkeypatch.setattr(io, "NodeOutput", lambda *given, ui: shown.update(ui) or given)
        texts = []
        told = load_pack("nodes.sparge_report")
        monkeypatch.setattr(told, "show_on_node", lambda node_id, text: texts.append(text))
        return node.execute(patched, {"samples": 0}), shown, texts[-1]

    return of


def test_the_report_shows_itself(ran, result, report, load_pack, monkeypatch):
    found = result()
    (_, text, image), shown, under = ran(found, monkeypatch)
    assert shown["text"] == (text,) and shown["images"][0] is image
    assert text == report.details(found)
    assert under == load_pack("sparge.session").verdict(found)


def test_lines_on_a_node_end_where_their_breaks_are_shown_as_spaces(load_pack):
    told_apart = load_pack("nodes.comfyui").told_apart
    assert told_apart("2.7x faster: 34 s, not 91 s\n20 % computed") == (
        "2.7x faster: 34 s, not 91 s.\n20 % computed"
    )
    assert told_apart("error 5 %\n(Saved.)") == "error 5 %\n(Saved.)"
    assert told_apart("Is it on?\nYes.\n") == "Is it on?\nYes."

# SPDX-License-Identifier: Apache-2.0
"""The line of a run in the log, in the report and on the node, and the picture of it."""

from __future__ import annotations

import logging
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from sparge.reasons import LINES, Reason


@pytest.fixture
def result(load_pack):
    """result(...) of a manual run of three steps and two layers, with these changes."""

    def make(by_step=((1.0, 0.5, 0.25), (1.0, math.nan, 0.75)), sparse=3, **of_run):
        report, steps = load_pack("sparge.session.report"), torch.tensor(by_step).view(-1, 3)
        counts = report.Counts(family="Mochi", tokens=44776, sparse=sparse, passes=3)
        layers = torch.arange(len(steps))
        densities = report.Densities(0.44, 0.25, steps.nanmean(0), steps, layers)
        time, no_calls = report.RunTime({}, None), load_pack("nodes.run").Run.no_calls
        return report.Report(counts, None, densities, (), time, no_calls, **of_run)

    return make


@pytest.fixture
def published(load_pack, caplog):
    """published(result, node): the record in the log."""

    def of(result, node=None):
        with caplog.at_level(logging.INFO, "sparge"):
            load_pack("nodes.comfyui").publish(result, node)
        (record,) = caplog.records
        return record

    return of


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sparse": 0}, "nothing was skipped: no attention call reached this node"),
        ({"notes": (Reason("remove one."),)}, "; remove one"),
        ({"sparse": 0, "stopped": True}, "stopped before the first sparse step"),
    ],
    ids=["nothing was skipped", "a note", "stopped"],
)
def test_what_the_user_has_to_know_is_a_warning(result, published, changes, words):
    """Whoever stops a run is not warned."""
    record = published(result(**changes))
    assert record.levelno == (logging.INFO if "stopped" in changes else logging.WARNING)
    assert words in record.message


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


@pytest.fixture
def picture(load_pack):
    return load_pack("nodes.sparge_report")


def inked(image):
    """Points of letters, which are smooth."""
    return int((image.amin(-1) > 0.5).sum())


def test_the_picture_shows_densities(picture, result):
    image = picture.draw(result())
    assert image.ndim == 4 and image.shape[0] == 1 and image.shape[-1] == 3
    assert image.dtype == torch.float32
    assert float(image.mean()) < 0.5, "dark, as the nodes around it"
    lines = [line for kind in LINES for line in Reason("", kind, 1 << 20).lines(1 << 20)[:2]]
    headline, room = picture._font(picture.HEADLINE), picture.WIDTH - 2 * picture.MARGIN
    assert max(map(headline.getlength, lines)) <= room
    tall = picture.TALLEST_CELL
    wide = (image.shape[2] - picture.RIGHT - picture.LEFT) / 3
    for row, column, density in [(0, 0, 1.0), (0, 1, 0.5), (0, 2, 0.25), (1, 2, 0.75), (1, 1, -1)]:
        at = picture.TOP + round((row + 0.5) * tall), picture.LEFT + round((column + 0.5) * wide)
        colour = picture.coloured(torch.tensor(density)) if density > 0 else picture.EMPTY
        assert torch.equal((255 * image[0][at]).round(), torch.as_tensor(colour).float())


def test_a_run_without_layers_has_a_picture_of_words(picture, result):
    assert inked(picture.draw(result(by_step=()))) > 100


def test_the_report_shows_itself(load_pack, picture, patch, result, monkeypatch):
    found, session, patched, shown = result(), load_pack("sparge.session"), patch(), {}
    load_pack("nodes.hook").hook_of(patched).last = found
    io = sys.modules["comfy_api.latest"].io
    monkeypatch.setattr(io, "NodeOutput", lambda *given, ui: shown.update(ui) or given)
    monkeypatch.setattr(picture, "show_on_node", lambda _, text: shown.update(under=text))
    _, text, image = picture.SpargeAttentionReport.execute(patched, {"samples": 0})
    assert shown["text"] == (text,) and shown["images"][0] is image
    assert text == session.details(found)
    assert shown["under"] == "\n".join(session.verdict(found))


def test_lines_on_a_node_end_where_their_breaks_are_shown_as_spaces(load_pack):
    told_apart = load_pack("nodes.comfyui").told_apart
    assert told_apart("Speedup 2.7x: 34 s, not 91 s\n20 % computed") == (
        "Speedup 2.7x: 34 s, not 91 s.\n20 % computed"
    )
    assert told_apart("off by 5 %\n(Saved.)") == "off by 5 %\n(Saved.)"
    assert told_apart("Is it on?\nYes.\n") == "Is it on?\nYes."

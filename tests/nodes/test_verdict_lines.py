# SPDX-License-Identifier: Apache-2.0
"""The two lines on the node."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def lines(load_pack):
    """lines(seconds, saved, notes, stopped, ...): of a run with such a tally."""

    def of_run(seconds=34.0, saved=57.0, notes=(), stopped=False, error=None, **tally):
        module, tune = load_pack("nodes.result"), load_pack("sparge.tune")
        facts = {"family": "Mochi", "tokens": 44776, "forwards": 20, "sparse": 864} | tally
        facts["reasons"] = Counter(facts.pop("reasons", {"before start_percent 0.1": 96}))
        densities = tune.Densities(0.204, torch.full((1, 1), 0.2))
        time = tune.RunTime({}, saved, by_table=True)
        report = tune.Report(None, densities, (), {}, time)
        if error is not None:
            report.__dict__["mean_error"] = lambda name: error if name == "probed" else 0.3
        result = module.RunResult(
            tune.Tally(**facts), report, stopped, tuple(notes), seconds=seconds
        )
        return load_pack("nodes.verdict").verdict(result).split("\n")

    return of_run


def test_a_good_run_says_what_it_gained_and_how_near_it_is(lines):
    assert lines(error=0.043) == [
        "2.7x faster: 34 s, not 91 s",
        "20 % of attention computed, error 4 %",
    ]
    assert lines(seconds=2.93, saved=0.53)[0] == "1.2x faster: 2.9 s, not 3.5 s"
    assert lines(seconds=1200.0, saved=1800.0)[0] == "2.5x faster: 20 min, not 50 min"
    assert lines(seconds=34.0, saved=-2.0)[0] == "As fast as without: 34 s"


def test_without_times_it_says_how_many_calls_were_sparse(lines):
    assert lines(saved=None) == ["864 of 960 calls were sparse", "20 % of attention computed"]


def test_a_warning_takes_the_second_line_and_fits(lines):
    first, second = lines(notes=["the results do not add up, remove one of the two nodes", "more"])
    assert first.startswith("2.7x") and second == "the results do not add up, remove ..."


@pytest.mark.parametrize(
    ("tally", "expected"),
    [
        ({"saved": None}, ["NOTHING WAS SPARSE", "before start_percent 0.1"]),
        (
            {"saved": 7.0, "eight_bit": 96},
            ["1.2x faster: 34 s, not 41 s", "all in 8 bits, nothing skipped"],
        ),
        ({"forwards": 0, "reasons": {}}, ["The model did not run"]),
        (
            {"reasons": {}},
            ["No attention call reached this node", "Put it last, before the sampler"],
        ),
        ({"stopped": True}, ["Stopped before the first sparse step"]),
        (
            {"stopped": True, "may_have_been_sparse": True},
            ["Stopped early", "before start_percent 0.1"],
        ),
    ],
)
def test_where_nothing_was_sparse_it_says_why(lines, tally, expected):
    assert lines(sparse=0, **tally) == expected


def test_a_node_in_a_subgraph_shows_it_on_those_that_hold_it(load_pack, monkeypatch):
    shown = []
    server = SimpleNamespace(send_progress_text=lambda text, node: shown.append((text, node)))
    module = SimpleNamespace(PromptServer=SimpleNamespace(instance=server))
    monkeypatch.setitem(sys.modules, "server", module)
    load_pack("nodes.host").show_on_node("12:3:7", "text")
    assert shown == [("text", "12"), ("text", "12:3"), ("text", "12:3:7")]

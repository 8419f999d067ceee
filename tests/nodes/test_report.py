# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def run(load_pack, reference_allowed):
    class Flow:
        def percent_to_sigma(self, percent):
            return 1 - percent

    return load_pack("nodes.run_state").Run(load_pack("nodes.settings").Settings(), Flow(), None)


@pytest.fixture
def report(load_pack):
    return load_pack("nodes.report")


def count(run, sparse=0, reasons=(), cross=0, forwards=1):
    for _ in range(forwards):
        run.tally.add_forward("Mochi")
    for _ in range(sparse):
        run.tally.add_sparse(44776)
    for reason in reasons:
        run.tally.add_dense(reason, 44776)
    for _ in range(cross):
        run.tally.add_dense("cross-attention", 44776)


def test_a_good_run(run, report):
    count(run, sparse=3, reasons=["before start_percent 0.2"], cross=4)
    run.stats(torch.device("cpu")).counters += torch.tensor([1, 4, 0])
    assert report.summary(run) == (
        "Mochi, 44,776 tokens; 3 sparse and 1 dense self-attention calls, density 25.0 %; "
        "dense because: before start_percent 0.2 (1); 4 cross-attention calls (always dense)"
    )


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"reasons": ["attention mask"] * 2}, "dense because: attention mask (2)"),
        ({}, "no attention call reached this node"),
        ({"forwards": 0}, "the model did not run"),
    ],
)
def test_nothing_sparse_is_a_warning_with_its_reason(run, report, caplog, counts, text):
    count(run, **counts)
    with caplog.at_level(logging.INFO, "sparge"):
        report.publish(run, None, stopped=False)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "NOTHING WAS SPARSE" in record.message
    assert text in record.message


def test_one_line_in_the_log_and_the_same_on_the_node(run, report, caplog, monkeypatch):
    shown = []
    server = SimpleNamespace(
        PromptServer=SimpleNamespace(
            instance=SimpleNamespace(
                send_progress_text=lambda text, node: shown.append((node, text))
            )
        )
    )
    monkeypatch.setitem(sys.modules, "server", server)
    count(run, sparse=1)
    with caplog.at_level(logging.INFO, "sparge"):
        report.publish(run, "12", stopped=True)
    ((node, text),) = shown
    assert node == "12" and text.endswith("stopped early") and "\n" not in text
    assert [record.message for record in caplog.records] == [f"[Sparge] {text}"]


def test_notes_appear_once(run, report):
    count(run, sparse=1)
    run.note("remove one")
    run.note("remove one")
    assert report.summary(run).count("remove one") == 1

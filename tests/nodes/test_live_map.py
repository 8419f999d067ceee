# SPDX-License-Identifier: Apache-2.0
"""The map that grows on the report nodes of a run, and the nodes that it is shown on."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import pytest

pytestmark = pytest.mark.usefixtures("reference_allowed")

GRAPH = {
    "1": ("Loader", None),
    "2": ("SpargeAttention", "1"),
    "3": ("LoraLoader", "2"),
    "4": ("SpargeAttentionReport", "2"),
    "5": ("SpargeAttentionReport", "3"),
    "6": ("SpargeAttentionReport", "1"),
    "7": ("SpargeAttentionReport", None),
    "8": ("KSampler", "2"),
}
"""Class of each node, and the node that its model comes from."""


@pytest.fixture
def pictures(monkeypatch):
    """The (node, picture) that the browser is sent, and (node, state) without one."""
    sent, entries = [], defaultdict(lambda: {"state": "pending"})

    def update(node, value, most, entry, prompt, preview):
        assert entry is entries[node] and prompt == "prompt"
        assert preview is None or (preview[0] == "PNG" and entry["state"] == "pending")
        sent.append((node, preview[1] if preview else entry["state"]))

    nodes = {
        node: {"class_type": kind, "inputs": {"model": [source, 0]} if source else {}}
        for node, (kind, source) in GRAPH.items()
    }
    state = SimpleNamespace(
        dynprompt=SimpleNamespace(all_node_ids=lambda: set(nodes), get_node=nodes.__getitem__),
        handlers={"webui": SimpleNamespace(update_handler=update)},
        ensure_entry=entries.__getitem__,
        prompt_id="prompt",
    )
    progress = ModuleType("comfy_execution.progress")
    vars(progress)["get_progress_state"] = lambda: state
    vars(progress)["NodeState"] = SimpleNamespace(Running="running")
    monkeypatch.setitem(sys.modules, progress.__name__, progress)
    return sent


@pytest.fixture
def run(load_pack, sampled, step, pictures):
    """run(node id, seconds between pictures): a run of five steps, one of them dense."""
    live_map, hook_of = load_pack("nodes.live_map"), load_pack("nodes.hook").hook_of

    def of(monkeypatch, node_id="2", seconds=0.0, **given):
        monkeypatch.setattr(live_map, "SECONDS", seconds)
        return sampled(
            step,
            (1.0, 0.7, 0.6, 0.4, 0.2),
            prepared=lambda patched: setattr(hook_of(patched), "node_id", node_id),
            **given,
        )

    return of


def test_reports_of_the_model_show_each_step_that_is_over(run, pictures, load_pack, monkeypatch):
    picture, maps = load_pack("nodes.picture"), []
    draw = picture.so_far

    def listen(text, by_step, layers):
        maps.append((text.split("\n")[0], by_step))
        return draw(text, by_step, layers)

    monkeypatch.setattr(picture, "so_far", listen)
    got = run(monkeypatch)
    assert sorted({node for node, _ in pictures}) == ["4", "5"], "those behind this node"
    of_each = [[state for node, state in pictures[-4:] if node == each] for each in "45"]
    assert of_each == [["running", "pending"]] * 2, "it makes room for the report's own picture"
    assert len(pictures[:-4]) == 2 * 3 and all(image.width == 800 for _, image in pictures[:-4])
    whole = got.last.report.by_step
    for place, (headline, by_step) in enumerate(maps, 1):
        assert headline == f"Step {place + 1} of 5" and by_step.shape == whole.shape
        assert by_step[:, :place].equal(whole[:, :place]) and by_step[:, place:].isnan().all()


def test_it_goes_where_the_model_is_not_evaluated_in_the_last_step(run, pictures, monkeypatch):
    """dpm_fast, dpm_adaptive; LazyCache may skip that step."""
    got = run(monkeypatch, schedule=[1.0, 0.7, 0.6, 0.4, 0.2, 0.1])
    shown = [image for _, image in pictures if not isinstance(image, str)]
    assert got.tally.sparse and len(shown) == 2 * 4
    assert [state for _, state in pictures[len(shown) :]] == 2 * ["running", "pending"]


def test_pictures_are_some_time_apart(run, pictures, monkeypatch):
    run(monkeypatch, seconds=1000.0)
    assert len(pictures) == 2 + 4


def test_the_report_gives_the_browser_a_second_to_drop_it(pictures, load_pack, monkeypatch):
    host, waits = load_pack("nodes.host"), []
    monkeypatch.setattr(time, "sleep", waits.append)
    host.let_picture_go("4")
    host.drop_picture("4")
    for node in ("4", "5", None):
        host.let_picture_go(node)
    later = time.perf_counter() + host.SECONDS_TO_DROP
    monkeypatch.setattr(time, "perf_counter", lambda: later)
    host.let_picture_go("4")
    assert [round(wait, 1) for wait in waits] == [0, 1, 0, 0]


@pytest.mark.parametrize("node_id", [None, "8"])
def test_without_a_report_nothing_is_counted(run, pictures, load_pack, monkeypatch, node_id):
    session = load_pack("sparge.tune").Session
    monkeypatch.setattr(session, "so_far", lambda self: pytest.fail("counted for nobody"))
    got = run(monkeypatch, node_id)
    assert not pictures and got.tally.sparse and not got.run.failures._told


@pytest.mark.parametrize("lacking", ["an idle GPU", "Pillow", "a server"])
def test_a_picture_that_cannot_be_had_costs_nothing(run, pictures, load_pack, monkeypatch, lacking):
    if lacking == "an idle GPU":
        monkeypatch.setattr(load_pack("sparge.tune").Session, "so_far", lambda self: None)
    elif lacking == "Pillow":
        monkeypatch.setitem(sys.modules, load_pack("nodes.picture").__name__, None)
        monkeypatch.delattr(load_pack("nodes"), "picture")
    else:
        monkeypatch.delitem(sys.modules, "comfy_execution.progress")
    got = run(monkeypatch)
    assert not pictures and got.tally.sparse and not got.run.failures._told

# SPDX-License-Identifier: Apache-2.0
"""The graphs in workflows/ and the blueprints in subgraphs/ in ComfyUI's real frontend, in both of
its UIs: what an artist sees.

Screenshots go to pytest's temporary folder, or to the one that SCREENSHOTS names. What a run shows
on nodes is sent to the frontend without a run, for no machine has all the models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comfy.browser import Page, front_end, opened, why_no_browser
from tests.comfy.drawn import AFTER_A_RUN, NODES, VERDICT, overlaps, put_example
from tests.comfy.server import Server
from tests.comfy.test_workflows_server import SUBGRAPHS, WORKFLOWS, put_placeholders
from tests.links import Link, hidden_links

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

#: Names of the nodes at a link's ends, and the places of its sockets as they are drawn.
LINKS = """() => [...app.canvas.graph.links.values()].filter(
  link => link.origin_id > 0 && link.target_id > 0).map(link => {
  const [from, to] = [link.origin_id, link.target_id].map(id => app.canvas.graph.getNodeById(id));
  return [from.title, to.title,
    [...from.getOutputPos(link.origin_slot)], [...to.getInputPos(link.target_slot)]];
})"""
#: Title and widgets of the one subgraph.
FACES = """() => app.graph._nodes.filter(node => node.subgraph).map(
  node => [node.title, (node.widgets ?? []).map(widget => [widget.name, widget.value])])"""
#: What is sent to the server of a subgraph whose clip is saved.
PROMPT_OF_SAVED = """async () => {
  const [node] = app.graph._nodes, save = LiteGraph.createNode('SaveVideo');
  save.pos = [node.pos[0] + node.size[0] + 100, node.pos[1]];
  app.graph.add(save);
  node.connect(0, save, 0);
  return (await app.graphToPrompt()).output;
}"""
#: As the server sends it for the node that holds a Sparge Attention that has run.
VERDICT_ON_PARENT = """text => {
  const detail = {nodeId: String(app.graph._nodes[0].id), text};
  app.api.dispatchEvent(new CustomEvent('progress_text', {detail}));
  app.canvas.setDirty(true, true);
}"""
HOLDERS = "() => app.graph._nodes.filter(node => node.subgraph).map(node => String(node.id))"
ENTER = """id => app.canvas.setGraph(
  app.graph._nodes.find(node => String(node.id) === id).subgraph)"""
FIT = """() => {
  app.canvas.deselectAll();
  app.extensionManager.command.execute('Comfy.Canvas.FitView');
}"""
ZOOM = "() => app.canvas.ds.scale"
COMPLAINTS = ("missing node", "errors found", "error found")
#: What the node said of Mochi 848x480x163, 20 steps, with a new node's widgets (H100, ef3a3bd).
AS_MEASURED = "2.9x faster: 30 s, not 89 s\n18 % of attention computed, error 5 %"
#: Pixels around the nodes of the README's picture.
EDGE = 20
#: Where the default canvas begins to leave out text.
LEAST_ZOOM = 0.575


@pytest.fixture(scope="module")
def server(start_server: Any, base_directory: Path, comfyui_env: dict[str, str]) -> Server:
    put_placeholders(base_directory)
    put_example(base_directory)
    return start_server(base_directory, comfyui_env, front_end=front_end())


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Page]:
    with opened(server.url) as page:
        yield page


@pytest.mark.parametrize("nodes_2", [False, True], ids=["default", "nodes-2"])
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_graph_opens_tidy(path: Path, nodes_2: bool, page: Page, screenshots: Path) -> None:
    graph = json.loads(path.read_text(encoding="utf-8"))
    page.nodes_2(nodes_2)
    page.errors.clear()
    page.open(graph)
    name = f"{path.stem[:2]}_{'nodes2' if nodes_2 else 'default'}"
    page.screenshot(screenshots / f"{name}_opened.png")
    before = page.run(NODES)
    assert len(before) == len(graph["nodes"])
    assert page.run(ZOOM) >= LEAST_ZOOM
    said = page.text().lower()
    assert not any(words in said for words in COMPLAINTS)
    assert_tidy(page)

    page.run(AFTER_A_RUN, VERDICT)
    page.settle()
    page.screenshot(screenshots / f"{name}_after.png")
    assert_tidy(page)
    assert_tidy_inside(page, screenshots / name)
    assert page.errors == []


def assert_tidy(page: Page) -> None:
    """No node over another, no link that runs backwards, none behind a node."""
    nodes = page.run(NODES)
    assert overlaps(nodes) == []
    boxes = {node["name"]: node["box"] for node in nodes}
    assert len(boxes) == len(nodes)
    links = [Link(*each) for each in page.run(LINKS)]
    for link in links:
        assert boxes[link.source][2] < boxes[link.target][0], link
    assert hidden_links(links, boxes) == []


def assert_tidy_inside(page: Page, picture: Path) -> None:
    """In every subgraph. picture: path without an ending."""
    for holder in page.run(HOLDERS):
        page.run(ENTER, holder)
        page.settle()
        page.run(FIT)
        page.settle()
        page.screenshot(picture.with_name(f"{picture.name}_inside_{holder}.png"))
        assert_tidy(page)


@pytest.mark.parametrize("nodes_2", [False, True], ids=["default", "nodes-2"])
@pytest.mark.parametrize("path", SUBGRAPHS, ids=lambda path: path.stem)
def test_a_blueprint_can_be_placed(
    path: Path, nodes_2: bool, page: Page, server: Server, screenshots: Path
) -> None:
    (blueprint,) = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    page.nodes_2(nodes_2)
    page.errors.clear()
    page.place(path.stem)
    page.screenshot(screenshots / f"{path.stem}_{nodes_2}_placed.png")
    ((title, widgets),) = page.run(FACES)
    assert title == path.stem
    names = [socket["name"] for socket in blueprint["inputs"]]
    assert widgets == [list(pair) for pair in zip(names, blueprint["widgets_values"], strict=True)]

    prompt = page.run(PROMPT_OF_SAVED)
    status, answer = server.post("/prompt", {"prompt": prompt})
    server.post("/queue", {"clear": True})
    server.post("/interrupt", {})
    assert status == 200 and answer["node_errors"] == {}, json.dumps(answer, indent=1)

    page.run(VERDICT_ON_PARENT, VERDICT)
    page.settle()
    page.screenshot(screenshots / f"{path.stem}_{nodes_2}_after.png")
    assert VERDICT.splitlines()[0] in page.text()

    assert_tidy_inside(page, screenshots / f"{path.stem}_{nodes_2}")
    assert page.errors == []


#: Shows the graph at its own size, without the names of packs above nodes.
AT_ITS_SIZE = """async ([x, y]) => {
  await app.extensionManager.setting.set('Comfy.NodeBadge.NodeSourceBadgeMode', 'None');
  app.canvas.ds.scale = 1;
  app.canvas.ds.offset = [x, y];
  app.canvas.setDirty(true, true);
}"""


def test_the_node_stands_between_model_and_sampler(page: Page, screenshots: Path) -> None:
    """As the README shows it: assets/node.png is this picture."""
    page.nodes_2(False)
    page.open(json.loads((Path(__file__).parent / "node.json").read_text(encoding="utf-8")))
    page.run(AFTER_A_RUN, AS_MEASURED)
    page.run(AT_ITS_SIZE, [200, 200])
    page.settle()
    boxes = [node["box"] for node in page.run(NODES)]
    left, top = (200 - EDGE + min(box[side] for box in boxes) for side in (0, 1))
    right, bottom = (200 + EDGE + max(box[side] for box in boxes) for side in (2, 3))
    page.screenshot(screenshots / "node.png", (left, top, right, bottom))
    assert (screenshots / "node.png").stat().st_size < 120_000 and page.errors == []


def test_faults_are_found(page: Page) -> None:
    """Shows that the test above can fail."""
    graph = json.loads(WORKFLOWS[0].read_text(encoding="utf-8"))
    one, two = graph["nodes"][:2]
    two["pos"] = [one["pos"][0], one["pos"][1] + 20]
    graph["nodes"][-1]["type"] = "NoSuchNode"
    page.open(graph)
    assert len(overlaps(page.run(NODES))) == 1
    assert any(words in page.text().lower() for words in COMPLAINTS)

# SPDX-License-Identifier: Apache-2.0
"""The pack in ComfyUI's real frontend, in both of its UIs, as an artist sees it: each node, the
graphs in workflows/, the blueprints in subgraphs/, and what a search puts first. What the frontend
makes of a graph goes to a real server, which has to accept it.

Screenshots go to pytest's temporary folder, or to the one that SCREENSHOTS names. No machine has
all the models: empty files have their names, what the server accepts is thrown out of its queue,
and what a run shows on nodes is sent to the frontend without a run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparge.reasons import LINES, Reason
from tests.comfy.browser import Page, front_end, opened, why_no_browser
from tests.comfy.conftest import PACK
from tests.comfy.server import Server
from tests.links import Link, hidden_links
from tools import locales

WORKFLOWS = sorted((PACK / "workflows").glob("*.json"))
SUBGRAPHS = sorted((PACK / "subgraphs").glob("*.json"))

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())
both_uis = pytest.mark.parametrize("nodes_2", [False, True], ids=["default", "nodes-2"])

#: Nodes as they are drawn: those of Nodes 2.0 are elements of the page, title and all.
NODES = """() => app.canvas.graph._nodes.map(node => {
  const element = document.querySelector(`[data-node-id="${node.id}"]`);
  const title = LiteGraph.NODE_TITLE_HEIGHT;
  const [width, height] = element
    ? [element.offsetWidth, element.offsetHeight] : [node.size[0], node.size[1] + title];
  const [x, y] = [node.pos[0], node.pos[1] - title];
  return {name: node.title, type: node.type, box: [x, y, x + width, y + height]};
})"""
VERDICT = "Speedup 2.7x: 34 s, not 91 s.\n29 % of attention computed, off by 5 %"
#: Two lines on each node of ours, and pictures where a run leaves one.
AFTER_A_RUN = """lines => {
  const send = (kind, detail) => app.api.dispatchEvent(new CustomEvent(kind, {detail}));
  for (const {id, type} of app.graph._nodes) {
    const text = lines;
    if (/^SpargeAttention/.test(type)) send('progress_text', {nodeId: String(id), text});
    if (!/Report$|Compare$|^Save/.test(type)) continue;
    const clip = type === 'SaveVideo', filename = clip ? 'example.webm' : 'example.png';
    // Of Nodes 2.0, the player of an animated one would stay on the page when its graph has gone.
    const animated = [clip && !LiteGraph.vueNodesMode];
    const output = {images: [{filename, subfolder: '', type: 'input'}], animated};
    send('executed', {node: String(id), display_node: String(id), prompt_id: 'one', output});
  }
}"""
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
PROMPT = "async () => (await app.graphToPrompt()).output"
#: The same of a subgraph whose clip is saved.
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
AS_MEASURED = "Speedup 2.9x: 30 s, not 89 s\n18 % of attention computed, off by 5 %"
#: Pixels around the nodes of the README's picture.
EDGE = 20
#: Where the default canvas begins to leave out text.
LEAST_ZOOM = 0.575


def overlaps(nodes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    found = []
    for one, two in itertools.combinations(nodes, 2):
        a, b = one["box"], two["box"]
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]:
            found.append((one["name"], two["name"]))
    return found


def put_example(base: Path) -> None:
    """Puts a picture into a base directory that has the shape of a report's, and a clip."""
    import av
    from PIL import Image

    folder = base / "input"
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (1200, 990), (90, 90, 120)).save(folder / "example.png")
    with av.open(folder / "example.webm", "w") as file:
        stream = file.add_stream("libvpx-vp9", rate=8)
        stream.width, stream.height, stream.pix_fmt = 424, 240, "yuv420p"
        still = av.VideoFrame.from_image(Image.new("RGB", (424, 240), (90, 120, 90)))
        for frame in (still, still, None):
            file.mux(stream.encode(frame))


def put_placeholders(base: Path) -> None:
    """Puts empty files under the names that the graphs load."""
    for path in WORKFLOWS:
        ui = json.loads(path.read_text(encoding="utf-8"))
        inner = (each["nodes"] for each in ui.get("definitions", {}).get("subgraphs", []))
        for node in itertools.chain(ui["nodes"], *inner):
            files = [
                base / "models" / model["directory"] / model["name"]
                for model in node["properties"].get("models", [])
            ]
            if node["type"] == "LoadImage":
                files.append(base / "input" / node["widgets_values"][0])
            for file in files:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()


def assert_accepted(server: Server, prompt: dict[str, Any]) -> None:
    status, answer = server.post("/prompt", {"prompt": prompt})
    server.post("/queue", {"clear": True})
    server.post("/interrupt", {})
    assert status == 200 and answer["node_errors"] == {}, json.dumps(answer, indent=1)


@pytest.fixture(scope="module")
def server(start_server: Any, base_directory: Path, comfyui_env: dict[str, str]) -> Server:
    put_placeholders(base_directory)
    put_example(base_directory)
    return start_server(base_directory, comfyui_env, front_end=front_end())


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Page]:
    with opened(server.url) as page:
        yield page


@both_uis
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_graph_opens_tidy_and_is_accepted(
    path: Path, nodes_2: bool, page: Page, server: Server, screenshots: Path
) -> None:
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
    prompt = page.run(PROMPT)
    assert any(each["class_type"] == "SpargeAttention" for each in prompt.values())
    assert_accepted(server, prompt)

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


@both_uis
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

    assert_accepted(server, page.run(PROMPT_OF_SAVED))

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
    """The README shows this picture: assets/node.png."""
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


#: Adds nodes, four in a row. Names of models are as long as users make them: they show none.
ADD = """ids => {
  ids.forEach((id, index) => {
    const node = LiteGraph.createNode(id);
    node.pos = [150 + (index % 4) * 420, 170 + Math.floor(index / 4) * 480];
    app.graph.add(node);
    for (const widget of node.widgets ?? [])
      if (widget.name === 'model_name') widget.value = '';
  });
  app.canvas.ds.scale = 0.85;
  app.canvas.ds.offset = [0, 0];
  app.canvas.setDirty(true, true);
}"""
#: Texts on nodes that have less room than they take. The default canvas has no elements to ask, so
#: there it is titles, for which it keeps this much beside them.
CUT_OFF = {
    True: """() => [...document.querySelectorAll('[data-node-id] *')].filter(
      each => each.innerText && each.clientWidth && each.scrollWidth > each.clientWidth + 1
        && getComputedStyle(each).overflowX !== 'visible').map(each => each.innerText)""",
    False: """() => app.canvas.graph._nodes.filter(node => {
      const pen = document.createElement('canvas').getContext('2d');
      pen.font = LiteGraph.NODE_TEXT_SIZE + 'px Inter, Arial';
      return pen.measureText(node.getTitle()).width + 39 > node.size[0];
    }).map(node => node.getTitle())""",
}


@both_uis
def test_each_node_has_room_for_what_it_shows(page: Page, nodes_2: bool, screenshots: Path) -> None:
    page.nodes_2(nodes_2)
    page.errors.clear()
    page.open({"nodes": [], "links": [], "version": 0.4})
    page.run(ADD, list(locales.table()))
    page.settle()
    name = f"nodes_{'nodes2' if nodes_2 else 'default'}"
    page.screenshot(screenshots / f"{name}_added.png")
    assert len(page.run(NODES)) == len(locales.table())
    assert page.run(CUT_OFF[nodes_2]) == []

    page.run(AFTER_A_RUN, VERDICT)
    page.settle()
    page.screenshot(screenshots / f"{name}_after.png")
    assert page.run(CUT_OFF[nodes_2]) == [] and overlaps(page.run(NODES)) == []
    assert page.errors == []


#: Texts that a run leaves on nodes.
TEXTS = """() => Object.fromEntries(app.graph._nodes.map(node => [node.title,
  node.widgets?.find(widget => widget.name === '$$node-text-preview')?.value ?? '']))"""
#: Lines that have less room than they take where a node shows such a text.
CUT_LINES = """lines => [...document.querySelectorAll('span')]
  .filter(each => each.textContent.startsWith('Speedup'))
  .flatMap(each => {
    const pen = document.createElement('canvas').getContext('2d');
    pen.font = getComputedStyle(each).font;
    return lines.filter(line => pen.measureText(line).width > each.parentElement.clientWidth);
  })"""
#: As a run begins that leaves out the nodes with these titles.
BYPASS = """titles => {
  for (const node of app.graph._nodes) if (titles.includes(node.title)) node.mode = 4;
  for (const event of ['execution_start', 'execution_success'])
    app.api.dispatchEvent(new CustomEvent(event, {detail: {prompt_id: 'one'}}));
}"""


@both_uis
def test_verdicts_are_whole_and_leave_with_the_node(page: Page, nodes_2: bool) -> None:
    """At the width of a new node, and with a full stop where lines are told apart. Nodes 2.0 breaks
    lines between words."""
    page.nodes_2(nodes_2)
    page.open({"nodes": [], "links": [], "version": 0.4})
    page.run(ADD, list(locales.table()))
    page.run(AFTER_A_RUN, VERDICT)
    page.settle()
    shown = [name for name, text in page.run(TEXTS).items() if text == VERDICT]
    assert len(shown) == 4
    lines = [f"{x}." for kind in LINES for x in Reason("", kind, 1 << 20).lines(1 << 20)[:2]]
    assert nodes_2 or (page.run(CUT_LINES, lines) == [] != page.run(CUT_LINES, ["w" * 80]))
    page.run(BYPASS, shown[1:])
    page.settle()
    assert [name for name, text in page.run(TEXTS).items() if text] == shown[:1]


#: What artists type who want this node.
WORDS = ("sparge", "sparge attention", "sage attention", "speed", "sparse", "faster", "加速")


@pytest.mark.parametrize("box", ["default", "v1 (legacy)"])
@both_uis
def test_each_word_finds_the_node_first(page: Page, nodes_2: bool, box: str) -> None:
    """Among ComfyUI's own nodes and ours, without those of its partners: WaveSpeed Image Upscale
    is the first for `speed`, whose name is shorter."""
    page.nodes_2(nodes_2)
    first = {word: page.search(word, box)[:1] for word in WORDS}
    assert all(name and name[0].startswith("Sparge Attention (") for name in first.values()), first

# SPDX-License-Identifier: Apache-2.0
"""Every node of the pack as it is added in ComfyUI's real frontend, in both of its UIs, before and
after a run. Those of the pack's graphs have other titles and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comfy.browser import Page, front_end, opened, why_no_browser
from tests.comfy.drawn import AFTER_A_RUN, NODES, VERDICT, overlaps, put_example
from tools import locales

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

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
NARROW = "() => app.graph._nodes.forEach(node => node.setSize([200, node.size[1]]))"


@pytest.fixture(scope="module")
def page(start_server: Any, base_directory: Path, comfyui_env: dict[str, str]) -> Iterator[Page]:
    put_example(base_directory)
    server = start_server(base_directory, comfyui_env, front_end=front_end())
    with opened(server.url) as page:
        yield page


@pytest.mark.parametrize("nodes_2", [False, True], ids=["default", "nodes-2"])
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

    page.run(NARROW)
    page.settle()
    assert page.run(CUT_OFF[nodes_2]), "shows that the above can fail"

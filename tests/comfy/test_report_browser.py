# SPDX-License-Identifier: Apache-2.0
"""The report node in ComfyUI's real frontend, in both of its UIs, over a run of a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comfy.browser import Page, front_end, opened, why_no_browser
from tests.comfy.graphs import ALL_WIDGETS, graph, nested

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

REPORT = "8"
#: Looks at a page that a slow machine draws, a second apart.
TRIES = 60
#: Addresses of the pictures on the report: of the page's elements in Nodes 2.0. The other canvas
#: loads them when it draws, as under a mouse that moves.
PICTURES = """([id, page]) => {
  app.canvas.setDirty(true, true);
  return [...page ? document.querySelectorAll(`[data-node-id="${id}"] img`)
    : app.graph.getNodeById(id).imgs ?? []].map(picture => picture.src);
}"""
RUN = """() => new Promise((resolve, reject) => {
  app.api.addEventListener('execution_success', () => resolve(), {once: true});
  app.api.addEventListener('execution_error', event => reject(event.detail), {once: true});
  app.api.addEventListener('b_preview_with_metadata', () => window.maps = (window.maps ?? 0) + 1);
  window.maps = 0;
  app.queuePrompt(0);
})"""
MAPS = "() => window.maps"


@pytest.fixture(scope="module")
def page(start_server: Any, tiny_nodes: Path, comfyui_env: dict[str, str]) -> Iterator[Page]:
    server = start_server(tiny_nodes, comfyui_env, front_end=front_end())
    with opened(server.url) as page:
        yield page


@pytest.mark.parametrize("nodes_2", [False, True], ids=["default", "nodes-2"])
def test_the_map_of_the_run_makes_room_for_the_picture_of_the_report(
    page: Page, nodes_2: bool
) -> None:
    prompt = graph("wan", **nested(ALL_WIDGETS | {"mode": "auto quality", "quality": "fast"}))
    prompt["9"] = {"class_type": "TinyWait", "inputs": {"latent": ["6", 0], "seconds": 4.0}}
    inputs = {"model": ["2", 0], "latent": ["9", 0]}
    prompt[REPORT] = {"class_type": "SpargeAttentionReport", "inputs": inputs}
    page.nodes_2(nodes_2)
    page.run("prompt => app.loadApiJson(prompt, 'tiny')", prompt)
    page.settle()
    page.run(RUN)
    assert page.run(MAPS) > 0
    for _ in range(TRIES):
        pictures = page.run(PICTURES, [REPORT, nodes_2])
        if (done := ["/view?" in each for each in pictures]) == [True]:
            break
        page.settle()
    assert done == [True], f"a map is a blob, and stays one: {pictures}"
    assert page.errors == []

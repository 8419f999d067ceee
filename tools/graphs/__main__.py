# SPDX-License-Identifier: Apache-2.0
"""Writes workflows/ and subgraphs/, and removes what no graph is named after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .blueprints import blueprints
from .shipped import graphs
from .thumbnail import draw

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS, SUBGRAPHS = ROOT / "workflows", ROOT / "subgraphs"


def main() -> None:
    made, parts = graphs(), blueprints()
    for folder, items in ((WORKFLOWS, made), (SUBGRAPHS, parts)):
        for path in folder.glob("*.*"):
            if path.stem not in {item.name for item in items}:
                path.unlink()
    for graph in made:
        _write(WORKFLOWS / f"{graph.name}.json", graph.json())
        draw(graph, WORKFLOWS / f"{graph.name}.jpg")
    for subgraph in parts:
        _write(SUBGRAPHS / f"{subgraph.name}.json", subgraph.blueprint())


def _write(path: Path, graph: dict[str, Any]) -> None:
    text = json.dumps(graph, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

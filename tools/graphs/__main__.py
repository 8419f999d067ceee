# SPDX-License-Identifier: Apache-2.0
"""Writes workflows/, and removes what no graph is named after."""

from __future__ import annotations

import json
from pathlib import Path

from .shipped import graphs
from .thumbnail import draw

FOLDER = Path(__file__).resolve().parents[2] / "workflows"


def main() -> None:
    made = graphs()
    for path in FOLDER.glob("*.*"):
        if path.stem not in {graph.name for graph in made}:
            path.unlink()
    for graph in made:
        text = json.dumps(graph.json(), indent=1, ensure_ascii=False) + "\n"
        (FOLDER / f"{graph.name}.json").write_text(text, encoding="utf-8")
        draw(graph, FOLDER / f"{graph.name}.jpg")


if __name__ == "__main__":
    main()

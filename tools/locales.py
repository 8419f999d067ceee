# SPDX-License-Identifier: Apache-2.0
"""Writes what ComfyUI reads, locales/<language>/nodeDefs.json, from the table, locales/*.json.

Run `python tools/locales.py` after a change of the table. A file of the table is of one node and
has each text of the node in every language, under the keys of ComfyUI's frontend: an input
`mode.topk` is `mode_topk`, outputs are counted from 0. English is in the schema of the node, and
in the table only where the schema's does not reach the browser.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "locales"
#: Those that ComfyUI's frontend offers.
LANGUAGES = ("en", "zh", "zh-TW", "ru", "ja", "ko", "fr", "es", "ar", "tr", "pt-BR", "fa", "he")


def table() -> dict[str, Any]:
    """Every file of the table, by the id of its node."""
    paths = sorted(FOLDER.glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def in_language(texts: dict[str, Any], language: str) -> Any:
    """The same tree with one text instead of all languages; None where it has none."""
    if texts.keys() <= set(LANGUAGES):
        return texts.get(language)
    found = {key: in_language(below, language) for key, below in texts.items()}
    return {key: text for key, text in found.items() if text is not None} or None


def files() -> dict[Path, str]:
    """What belongs into each file."""
    texts = table()
    return {
        FOLDER / language / "nodeDefs.json": json.dumps(
            in_language(texts, language), ensure_ascii=False, indent=2
        )
        + "\n"
        for language in LANGUAGES
    }


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()

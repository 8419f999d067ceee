# SPDX-License-Identifier: Apache-2.0
"""Every text of every node is in every language of the frontend, and says the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tools import locales

TABLE = locales.table()
TRANSLATED = locales.LANGUAGES[1:]
#: Where a text is: the node, then the keys in its file.
Place = tuple[str, ...]


def texts_below(tree: dict[str, Any], place: Place = ()) -> Iterator[tuple[Place, dict[str, str]]]:
    for key, below in tree.items():
        if isinstance(below, str):
            yield place, tree
            return
        yield from texts_below(below, (*place, key))


TEXTS = dict(texts_below(TABLE))


@pytest.fixture(scope="module")
def schemas(load_pack) -> list[Any]:
    nodes = asyncio.run(load_pack("nodes").SpargeExtension().get_node_list())
    return [node.define_schema() for node in nodes]


def widgets(schema: Any) -> Iterator[tuple[str, Any]]:
    """Inputs by the frontend's keys; what two modes have comes twice."""
    for each in schema.inputs:
        yield each.id, each
        for option in getattr(each, "options", None) or []:
            for inner in getattr(option, "inputs", []):
                yield f"{each.id}_{inner.id}", inner


@pytest.fixture(scope="module")
def english(schemas) -> dict[Place, str]:
    """What each place says in English; where a widget has a tooltip in each mode, all of them."""
    found: dict[Place, list[str]] = {}
    for schema in schemas:
        node = schema.node_id
        found[node, "display_name"] = [schema.display_name]
        found[node, "description"] = [schema.description]
        for key, each in widgets(schema):
            found.setdefault((node, "inputs", key, "name"), [each.id])
            found.setdefault((node, "inputs", key, "tooltip"), []).append(each.tooltip)
        for index, output in enumerate(schema.outputs):
            found[node, "outputs", str(index), "name"] = [output.id or ""]
            found[node, "outputs", str(index), "tooltip"] = [output.tooltip]
    return {place: " ".join(said) for place, said in found.items()}


def test_what_comfyui_reads_is_of_the_table() -> None:
    for path, text in locales.files().items():
        written = path.read_text(encoding="utf-8") if path.exists() else ""
        assert written == text, f"{path.parent.name}: run python tools/locales.py"
    folders = {path.name for path in locales.FOLDER.iterdir() if path.is_dir()}
    assert folders == set(locales.LANGUAGES)


def test_every_text_of_every_node_is_in_every_language(english) -> None:
    missing = []
    for node, *keys in english:
        texts = TEXTS.get((node, *keys), {})
        if lacking := [language for language in TRANSLATED if not texts.get(language)]:
            missing.append(f"locales/{node}.json: {'.'.join(keys)} in {', '.join(lacking)}")
    advice = "add to the table, then run python tools/locales.py:\n" + "\n".join(missing)
    assert missing == [], advice
    nodes = {node for node, *_ in english}
    unknown = [place for place in TEXTS if place[0] in nodes and place not in english]
    assert unknown == [], "no node has these: remove them from the table, or name them anew"

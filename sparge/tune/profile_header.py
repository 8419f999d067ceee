# SPDX-License-Identifier: Apache-2.0
"""The JSON header of a profile."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from ..blocks import KEY_BLOCK, block_count
from ..order.grid import TokenGrid
from .profile_path import ProfileError

#: Only this version is read.
VERSION = 1
#: Halves of characters: JSON has a way to write them, and no file or screen takes them.
HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")
MODES = ("quality", "budget")
HEADER_KEYS: dict[str, Any] = {
    "version": int,
    "architecture": str,
    "tables": list,
    "mode": str,
    "asked": (int, float),
    "created": str,
    "notes": dict,
}
TABLE_KEYS: dict[str, Any] = {
    "conditioning": str,
    "tokens": int,
    "floor": int,
    "grid": (dict, type(None)),
}
GRID_KEYS: dict[str, Any] = {part.name: int for part in fields(TokenGrid)}


class Table(NamedTuple):
    """Conditions that one set of settings was measured for."""

    conditioning: str
    tokens: int
    grid: TokenGrid | None = None
    """Token grid; None where nobody knew it."""

    @property
    def text(self) -> int:
        """Tokens beside the grid, where that is known."""
        return 0 if self.grid is None else self.grid.prefix + self.grid.suffix

    def differs_in_text_by(self, other: Table) -> int | None:
        """Difference in text tokens; None where the rest differs too, or where it is not known."""
        ours, theirs = self.grid, other.grid
        if ours is None or theirs is None or self.conditioning != other.conditioning:
            return None
        if replace(ours, prefix=0, suffix=0) != replace(theirs, prefix=0, suffix=0):
            return None
        return abs(ours.prefix - theirs.prefix) + abs(ours.suffix - theirs.suffix)


@dataclass(frozen=True)
class Header:
    architecture: str
    tables: tuple[Table, ...]
    floors: tuple[int, ...]
    mode: str
    asked: float
    created: str
    notes: dict[str, str]

    def to_json(self) -> str:
        """Returns the header as JSON. Raises ProfileError for what `from_json` would refuse."""
        content = {
            "version": VERSION,
            "architecture": self.architecture,
            "tables": [
                {
                    "conditioning": table.conditioning,
                    "tokens": table.tokens,
                    "floor": floor,
                    "grid": None if table.grid is None else asdict(table.grid),
                }
                for table, floor in zip(self.tables, self.floors, strict=True)
            ],
            "mode": self.mode,
            "asked": self.asked,
            "created": self.created,
            "notes": self.notes,
        }
        _check(content)
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str) -> Header:
        """Reads a header. Raises ProfileError for what is no header of this version."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"The profile's header is no JSON: {error}.") from error
        _check(content)
        rows = content["tables"]
        return cls(
            content["architecture"],
            tuple(_table(row) for row in rows),
            tuple(row["floor"] for row in rows),
            content["mode"],
            float(content["asked"]),
            content["created"],
            content["notes"],
        )


def _check(content: Any) -> None:
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise ProfileError(
            f"The profile has version {version!r} and only version {VERSION} is read: measure anew "
            "and save again."
        )
    _check_keys("header", content, HEADER_KEYS)
    if content["mode"] not in MODES:
        raise ProfileError(f"The profile's mode is {content['mode']!r}; it is one of {MODES}.")
    if not 0 < content["asked"] <= 1:  # nor NaN
        raise ProfileError(f"The profile asks for {content['asked']!r}; it takes 0 to 1.")
    for row in content["tables"]:
        _check_keys("table", row, TABLE_KEYS)
        if row["tokens"] < 1 or row["floor"] < 1:
            raise ProfileError(f"A table of the profile has {row}: counts start from 1.")
        if row["floor"] > block_count(row["tokens"], KEY_BLOCK):
            raise ProfileError(
                f"A table of the profile has {row}: its floor is more key blocks than its tokens "
                "fill. Measure again."
            )
    tables = [_table(row) for row in content["tables"]]
    if not tables or len(set(tables)) < len(tables):
        raise ProfileError("The profile has no table, or two for the same tokens and grid.")
    if not all(isinstance(x, str) for pair in content["notes"].items() for x in pair):
        raise ProfileError("The profile's notes hold something that is not text.")
    texts = [content["architecture"], content["created"], *(t.conditioning for t in tables)]
    for text in (*texts, *content["notes"], *content["notes"].values()):
        if HALF_CHARACTER.search(text):
            raise ProfileError(
                f"The profile's header has {text[:60]!r}, which holds half of a character and "
                "cannot be shown. Measure again."
            )


def _table(row: dict[str, Any]) -> Table:
    """Makes the table of a row whose keys and kinds are checked. Raises ProfileError for sizes that
    no grid has."""
    table, sizes = Table(row["conditioning"], row["tokens"]), row["grid"]
    if sizes is None:
        return table
    _check_keys("grid", sizes, GRID_KEYS)
    try:
        grid = TokenGrid(**sizes)
    except ValueError as error:
        raise ProfileError(f"A grid of the profile is none: {error}") from error
    if grid.tokens != table.tokens:
        raise ProfileError(
            f"A table of the profile has {table.tokens} tokens, and its grid {grid.tokens}."
        )
    return table._replace(grid=grid)


def _check_keys(what: str, content: Any, kinds: dict[str, Any]) -> None:
    if not isinstance(content, dict) or set(content) != set(kinds):
        found = sorted(content) if isinstance(content, dict) else content
        raise ProfileError(f"The profile's {what} has {found}; it takes {sorted(kinds)}.")
    for name, kind in kinds.items():
        if not isinstance(content[name], kind) or isinstance(content[name], bool):
            raise ProfileError(f"The profile's {what} has {name} = {content[name]!r}.")

# SPDX-License-Identifier: Apache-2.0
"""The JSON header of a profile."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from .profile_error import ProfileError

VERSION = 1
MODES = ("quality", "budget")


class Table(NamedTuple):
    """What one set of choices was measured for."""

    conditioning: str
    tokens: int


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
        """Raises ProfileError for what `from_json` would refuse."""
        content = {
            "version": VERSION,
            "architecture": self.architecture,
            "tables": [
                {"conditioning": table.conditioning, "tokens": table.tokens, "floor": floor}
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
        """Raises ProfileError for anything that is not a header of this version."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"The profile's header is no JSON: {error}.") from error
        _check(content)
        rows = content["tables"]
        return cls(
            content["architecture"],
            tuple(Table(row["conditioning"], row["tokens"]) for row in rows),
            tuple(row["floor"] for row in rows),
            content["mode"],
            float(content["asked"]),
            content["created"],
            content["notes"],
        )


def _check(content: Any) -> None:
    if not isinstance(content, dict) or content.get("version") != VERSION:
        version = content.get("version") if isinstance(content, dict) else None
        raise ProfileError(
            f"The profile has version {version!r} and this is for version {VERSION}: measure again."
        )
    _check_keys(
        "header",
        content,
        {
            "version": int,
            "architecture": str,
            "tables": list,
            "mode": str,
            "asked": (int, float),
            "created": str,
            "notes": dict,
        },
    )
    if content["mode"] not in MODES:
        raise ProfileError(f"The profile's mode is {content['mode']!r}; it is one of {MODES}.")
    if not 0 < content["asked"] <= 1 or not math.isfinite(content["asked"]):
        raise ProfileError(f"The profile asks for {content['asked']!r}; it takes 0 to 1.")
    for row in content["tables"]:
        _check_keys("table", row, {"conditioning": str, "tokens": int, "floor": int})
        if row["tokens"] < 1 or row["floor"] < 1:
            raise ProfileError(f"A table of the profile has {row}: counts start from 1.")
    names = [(row["conditioning"], row["tokens"]) for row in content["tables"]]
    if not names or len(set(names)) < len(names):
        raise ProfileError("The profile has no table, or two for the same tokens.")
    if not all(isinstance(x, str) for pair in content["notes"].items() for x in pair):
        raise ProfileError("The profile's notes hold something that is not text.")


def _check_keys(what: str, content: Any, kinds: dict[str, Any]) -> None:
    if not isinstance(content, dict) or set(content) != set(kinds):
        found = sorted(content) if isinstance(content, dict) else content
        raise ProfileError(f"The profile's {what} has {found}; it takes {sorted(kinds)}.")
    for name, kind in kinds.items():
        if not isinstance(content[name], kind) or isinstance(content[name], bool):
            raise ProfileError(f"The profile's {what} has {name} = {content[name]!r}.")

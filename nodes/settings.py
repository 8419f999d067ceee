# SPDX-License-Identifier: Apache-2.0
"""Widgets of SpargeAttention as one frozen value."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from ..sparge import session

#: Not the default of Settings, which an API graph gets: for the same time fewer dense steps and a
#: higher density are truer (docs/experiments.md, Dense steps for the same time).
START_OF_NEW_NODES = 0.1


@dataclass(frozen=True)
class Settings(session.Settings):
    """Values of the widgets. They are checked when the node runs: what comes through a link instead
    of a widget, the server has not looked at."""

    @classmethod
    def of_inputs(cls, mode: Any, inputs: dict[str, Any]) -> Settings:
        """Settings of what the server hands to the node. What `mode` shows comes nested in it from
        the browser (`mode.topk`), and beside it from API graphs (`topk`). What is None was not
        given, and what is no widget is left out, as the server does."""
        given = {name.removeprefix("mode."): value for name, value in inputs.items()}
        nested = mode if isinstance(mode, dict) else {"mode": mode}
        given |= {name: value for name, value in nested.items() if value is not None}
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)}
        known = {name: value for name, value in given.items() if name in kinds}
        return cls(**{n: _made(kinds[n], x) for n, x in known.items() if x is not None})


def _made(kind: Any, value: Any) -> Any:
    """Value of a kind; what cannot be made one stays as it is, and is refused with its name."""
    with suppress(TypeError, ValueError, OverflowError):
        return kind(value)
    return value

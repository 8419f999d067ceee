# SPDX-License-Identifier: Apache-2.0
"""JSON from files that nobody vouches for."""

from __future__ import annotations

import json
import reprlib
from typing import Any, NoReturn

LONGEST_SHOWN = 120


class ConversionError(ValueError):
    """The files given cannot be converted; the text is the sentence a user reads."""


def shown(value: object) -> str:
    """For a sentence: short, on one line, and of characters that every terminal takes."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"  # Python refuses to write very long ones
    text = value if isinstance(value, str) else reprlib.repr(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def read_json(data: bytes, what: str) -> dict[str, Any]:
    """The object that `data` is the text of, in UTF-8. Raises ConversionError for anything else,
    for names that come twice, and for numbers that are none."""
    try:
        content = json.loads(
            data.decode("utf-8"), object_pairs_hook=_each_once, parse_constant=_no_number
        )
    except RecursionError:
        raise ConversionError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise ConversionError(f"{what} is damaged: {shown(str(error))}") from None
    if not isinstance(content, dict):
        raise ConversionError(f"{what} is damaged: it is {shown(type(content).__name__)}")
    return content


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name comes twice")
    return content


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")

# SPDX-License-Identifier: Apache-2.0
"""Generated text as the documents have it: lines of at most 120 characters."""

from __future__ import annotations

import textwrap

WIDTH = 120


def paragraph(text: str) -> str:
    """The text on lines of at most WIDTH characters, with a newline at its end."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"

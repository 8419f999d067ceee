# SPDX-License-Identifier: Apache-2.0
"""The node's mode auto quality: its target errors by the names that they have there."""

from __future__ import annotations

#: As in nodes/aim.py, which needs the whole pack to be imported; a test compares the two.
TARGETS = {"high": 0.03, "balanced": 0.06, "fast": 0.10}
#: How rows call the mode; `ours auto` is a mean density.
AUTO_QUALITY = "ours auto quality"


def target(text: str) -> float:
    """Of a name or a number."""
    return TARGETS[text] if text in TARGETS else float(text)

# SPDX-License-Identifier: Apache-2.0
"""Target errors of the node's mode auto quality, by the names that they have there."""

from __future__ import annotations

#: Targets as in nodes/aim.py, which needs the whole pack to be imported; a test compares the two.
TARGETS = {"high": 0.03, "balanced": 0.06, "fast": 0.10}
#: Name of the mode in rows; `ours auto` is a mean density.
AUTO_QUALITY = "ours auto quality"


def target(text: str) -> float:
    """Target error of a name or a number."""
    return TARGETS[text] if text in TARGETS else float(text)

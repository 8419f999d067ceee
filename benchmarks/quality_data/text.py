# SPDX-License-Identifier: Apache-2.0
"""Real English text that every Python brings along: the language reference that `help()` shows.

It differs a little from one Python version to the next, so a result names the version.
"""

from __future__ import annotations

from pydoc_data.topics import topics


def python_reference(part: int, parts: int) -> str:
    """The articles number part, part + parts, part + 2 parts ... in order of their names.

    Different parts share no article, so one may be measured and another judged.
    """
    names = sorted(topics)
    return "\n\n".join(topics[name] for name in names[part::parts])

# SPDX-License-Identifier: Apache-2.0
"""Sentences that differ between hosts: why nothing was sparse, and what their user can do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Why:
    """Why nothing was sparse, where the reasons of dense calls do not say it."""

    told: str = ""
    """For the log."""
    lines: tuple[str, str] = ("", "")
    """For the verdict."""


@dataclass(frozen=True)
class HostWords:
    """Reasons of one host. In those of `replaced`, {what} is "clip" or "picture"."""

    no_calls: Why
    """No attention call came."""
    whole_graph: Why
    """None came, and torch.compile traced some model whole."""
    replaced: Why
    """None came of the clip's self-attention."""
    unreached: str
    """For a picture of layers that has nothing to show."""

    def why_replaced(self, what: str) -> Why:
        """what: "clip" or "picture"."""
        first, second = (line.format(what=what) for line in self.replaced.lines)
        return Why(self.replaced.told.format(what=what), (first, second))


#: Words of a host that has none of its own.
PLAIN = HostWords(
    no_calls=Why("no attention call came", ("No attention call came", "")),
    whole_graph=Why(
        "no attention call came: torch.compile with fullgraph=True leaves no room for a session "
        "(compile without fullgraph)",
        ("No attention call came", "Compile without fullgraph"),
    ),
    replaced=Why(
        "the {what}'s self-attention did not come: the model computes it in a way of its own",
        ("The {what}'s self-attention", "did not come"),
    ),
    unreached="no self-attention of a whole grid came",
)

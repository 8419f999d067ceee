# SPDX-License-Identifier: Apache-2.0
"""Shows that tests/links.py finds a link behind a node, which no shipped graph has."""

from __future__ import annotations

from tests.links import Link, hidden_links


def test_a_link_behind_a_node_is_found() -> None:
    ends = {"source": (-200.0, -30.0, 0.0, 90.0), "target": (600.0, -30.0, 800.0, 90.0)}
    between = {"behind this": (200.0, -30.0, 400.0, 30.0), "above that": (200.0, 40.0, 400.0, 90.0)}
    straight = Link("source", "target", (0.0, 0.0), (600.0, 0.0))
    assert hidden_links([straight], ends | between) == [("source", "target", "behind this")]


def test_a_steep_link_bulges_over_what_is_beside_it() -> None:
    steep = Link("source", "target", (0.0, 0.0), (20.0, 800.0))
    assert steep.passes_behind((20.0, 50.0, 220.0, 350.0))
    assert not steep.passes_behind((90.0, 50.0, 220.0, 350.0))

# SPDX-License-Identifier: Apache-2.0
"""The benchmark judges the targets that the node has."""

from __future__ import annotations

from benchmarks.quality.rows import TARGETS


def test_the_benchmarks_targets_are_the_nodes(load_pack) -> None:
    assert load_pack("nodes.settings").QUALITIES == TARGETS

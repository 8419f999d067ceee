# SPDX-License-Identifier: Apache-2.0
"""The benchmark judges the targets that the node has."""

from __future__ import annotations

from benchmarks.quality.targets import TARGETS, target


def test_the_benchmarks_targets_are_the_nodes(load_pack) -> None:
    assert load_pack("nodes.aim").QUALITIES == TARGETS


def test_a_target_is_a_name_or_a_number() -> None:
    assert target("high") == TARGETS["high"] and target("0.05") == 0.05

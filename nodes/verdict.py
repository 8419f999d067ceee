# SPDX-License-Identifier: Apache-2.0
"""Reasons why a run had nothing to make sparse, and what its user can do."""

from __future__ import annotations

from ..sparge.common.whole_graph import has_been_traced
from ..sparge.tune import MEASURING
from .result import RunResult

STOPPED = "stopped before the first sparse step"
NOT_RUN = "the model did not run"
NO_CALLS = (
    "no attention call reached this node; a node after it replaces the attention, or the model "
    "does not offer it (put Sparge Attention last, before the sampler)"
)
WHOLE_GRAPH = (
    "no attention call reached this node; torch.compile with fullgraph leaves it no room (turn "
    "fullgraph off), or a node after it replaces the attention"
)
REPLACED = (
    "the {what}'s self-attention did not reach this node; another node replaces it, or the model "
    "computes it in a way of its own"
)
ONE_STEP_AUTO = (
    "of a run of one step nothing is left after measuring: mode manual, or a profile, with "
    "start_percent 0 can make it sparse"
)
ONE_STEP_MANUAL = "the only step is before start_percent: 0 can make it sparse"


def why_nothing(result: RunResult) -> str:
    """Reason for a run without a sparse call; "" where the reasons of its dense calls say it."""
    if result.tally.sparse:
        return ""
    if result.stopped_early:
        return STOPPED
    if result.tally.forwards == 0:
        return NOT_RUN
    if result.tally.dense + result.tally.cross == 0:
        return WHOLE_GRAPH if has_been_traced() else NO_CALLS
    return REPLACED.format(what=result.tally.missing) if result.tally.missing else ""


def advice(result: RunResult) -> str:
    """Change that a user can make, where the reasons of dense calls would send them the wrong
    way.
    """
    if result.tally.sparse or result.steps != 1 or result.stopped_early:
        return ""
    waits = any(why.startswith("before start_percent") for why in result.tally.reasons)
    if result.report.aim is not None:
        return ONE_STEP_AUTO if waits or MEASURING in result.tally.reasons else ""
    return ONE_STEP_MANUAL if waits else ""

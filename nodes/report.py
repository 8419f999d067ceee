# SPDX-License-Identifier: Apache-2.0
"""What happened in a run, in one line: on the node and in the log, always."""

from __future__ import annotations

import logging

from .host import show_on_node
from .run_state import Run

logger = logging.getLogger("sparge")


def publish(run: Run, node_id: str | None, stopped: bool) -> None:
    """stopped: the run was cancelled or failed, so the counts cover a part of it."""
    text = summary(run, stopped)
    level = logging.WARNING if run.tally.sparse == 0 or run.notes else logging.INFO
    logger.log(level, "[Sparge] %s", text)
    show_on_node(node_id, text)


def summary(run: Run, stopped: bool = False) -> str:
    tally = run.tally
    parts = [f"{tally.family}, {tally.tokens:,} tokens" if tally.tokens else tally.family]
    if tally.sparse:
        parts.append(
            f"{tally.sparse} sparse and {tally.dense} dense self-attention calls, "
            f"density {100 * run.density():.1f} %"
        )
    else:
        parts.append("NOTHING WAS SPARSE" + ("" if tally.calls else f": {_no_calls(run)}"))
        if tally.dense:
            parts.append(f"{tally.dense} dense self-attention calls")
    if tally.reasons:
        reasons = (f"{why.rstrip('.')} ({count})" for why, count in tally.reasons.most_common())
        parts.append("dense because: " + ", ".join(reasons))
    if tally.cross:
        parts.append(f"{tally.cross} cross-attention calls (always dense)")
    parts.extend(run.notes)
    if stopped:
        parts.append("stopped early")
    return "; ".join(filter(None, parts))


def _no_calls(run: Run) -> str:
    if run.tally.forwards == 0:
        return "the model did not run"
    return (
        "no attention call reached this node; a node after it replaces the attention, or the model "
        "does not offer it (put Sparge Attention last, before the sampler)"
    )

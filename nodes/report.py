# SPDX-License-Identifier: Apache-2.0
"""Report of a run where it is over: two short lines on the node, one long line in the log."""

from __future__ import annotations

import logging

from ..sparge.sampling import RunResult, summary, verdict
from .host import show_on_node

logger = logging.getLogger("sparge")


def publish(result: RunResult, node_id: str | None) -> None:
    text = summary(result)
    as_meant = result.tally.sparse > 0 or result.stopped_early  # whoever stopped it knows
    level = logging.INFO if as_meant and not result.notes else logging.WARNING
    logger.log(level, "[Sparge] %s", text)
    show_on_node(node_id, verdict(result))

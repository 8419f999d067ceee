# SPDX-License-Identifier: Apache-2.0
"""Report of a run where it is over: two short lines on the node, one long line in the log."""

from __future__ import annotations

import logging

from ..sparge.session import Report, summary, verdict
from .host import show_on_node

logger = logging.getLogger("sparge")


def publish(report: Report, node_id: str | None) -> None:
    text = summary(report)
    as_meant = report.counts.sparse > 0 or report.stopped_early  # whoever stopped it knows
    level = logging.INFO if as_meant and not report.notes else logging.WARNING
    logger.log(level, "[Sparge] %s", text)
    show_on_node(node_id, verdict(report))

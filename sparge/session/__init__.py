# SPDX-License-Identifier: Apache-2.0
"""A sampling run as any framework drives it: heads are measured while calls are dense, chosen, and
measured again; each call is served sparse, or dense with a reason; a report tells what came of it.
"""

from .calls import MASK, Call, Dense, Kind, may_be_padding, unknown_options
from .heads import FAILED
from .report import Report
from .schedule import (
    AUTO_BUDGET,
    AUTO_QUALITY,
    MANUAL,
    QUALITIES,
    Aim,
    Progress,
    Settings,
    SigmaWindow,
    Step,
)
from .session import Pass, Session
from .timing import Exact, unusable_reason
from .tokens import UNNUMBERED, Layer, LayerSpans, TextPosition, TokenLayout
from .verdict import details, summary, verdict

__all__ = [
    "AUTO_BUDGET",
    "AUTO_QUALITY",
    "FAILED",
    "MANUAL",
    "MASK",
    "QUALITIES",
    "UNNUMBERED",
    "Aim",
    "Call",
    "Dense",
    "Exact",
    "Kind",
    "Layer",
    "LayerSpans",
    "Pass",
    "Progress",
    "Report",
    "Session",
    "Settings",
    "SigmaWindow",
    "Step",
    "TextPosition",
    "TokenLayout",
    "details",
    "may_be_padding",
    "summary",
    "unknown_options",
    "unusable_reason",
    "verdict",
]

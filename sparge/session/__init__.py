# SPDX-License-Identifier: Apache-2.0
"""A sampling run as any framework drives it: heads are measured while calls are dense, chosen, and
measured again; each call is served sparse, or dense with a reason; a report tells what came of it.
"""

from .calls import MASK, Call, CallFacts, DenseOnce, GivenCall, Kind, Untracked
from .heads import FAILED
from .report import PLAIN, Report, Why, Words
from .schedule import Aim, Progress, SigmaWindow, Step
from .session import Dense, Pass, Session
from .settings import AUTO_BUDGET, AUTO_QUALITY, MANUAL, MODES, QUALITIES, LayerSpans, Settings
from .timing import TORCH, Exact, unusable_reason
from .tokens import UNNUMBERED, Layer, TextPosition, TokenLayout
from .verdict import details, short_lines, summary, verdict

__all__ = [
    "AUTO_BUDGET",
    "AUTO_QUALITY",
    "FAILED",
    "MANUAL",
    "MASK",
    "MODES",
    "PLAIN",
    "QUALITIES",
    "TORCH",
    "UNNUMBERED",
    "Aim",
    "Call",
    "CallFacts",
    "Dense",
    "DenseOnce",
    "Exact",
    "GivenCall",
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
    "Untracked",
    "Why",
    "Words",
    "details",
    "short_lines",
    "summary",
    "unusable_reason",
    "verdict",
]

# SPDX-License-Identifier: Apache-2.0
"""A sampling run as any host drives it: settings, tokens of a pass, what becomes of each attention
call, and what is told when the run is over."""

from .decision import CallFacts, GivenCall, Kind
from .layout import Layer, TokenLayout
from .result import RunResult
from .run import Run, unusable_reason
from .served_pass import Dense, ServedPass
from .settings import AUTO_BUDGET, AUTO_QUALITY, MANUAL, MODES, QUALITIES, Settings
from .summary import details, summary
from .verdict import short_lines, verdict
from .words import HostWords, Why

__all__ = [
    "AUTO_BUDGET",
    "AUTO_QUALITY",
    "MANUAL",
    "MODES",
    "QUALITIES",
    "CallFacts",
    "Dense",
    "GivenCall",
    "HostWords",
    "Kind",
    "Layer",
    "Run",
    "RunResult",
    "ServedPass",
    "Settings",
    "TokenLayout",
    "Why",
    "details",
    "short_lines",
    "summary",
    "unusable_reason",
    "verdict",
]

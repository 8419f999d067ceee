# SPDX-License-Identifier: Apache-2.0
"""Sampling runs that `benchmarks.comfyui_call` makes of a model: without the node and with."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

AUTO_QUALITY = "auto quality"


@dataclass(frozen=True)
class NodeRun:
    name: str
    widgets: dict[str, Any] | None = None
    """Widgets of the node; None without the node."""
    residual: float | None = None
    """Share of heads with pooled keys, in a run from a profile of the one that measured."""
    may_stay_dense: bool = False
    """Random weights may need every pair for a target error."""


def node_runs(args: argparse.Namespace, *, profiles: bool) -> Iterator[NodeRun]:
    """Yields the runs, first the one without the node. profiles: with those that --residual asks
    for."""
    yield NodeRun("default")
    for run in _measured(args):
        yield run
        if profiles and args.residual is not None:
            name = f"{run.name}, residual in {args.residual:g}"
            yield replace(run, name=name, residual=args.residual)


def _measured(args: argparse.Namespace) -> Iterator[NodeRun]:
    """Yields the measured runs. As a rule every step is sparse: the share of dense steps is the
    user's choice."""
    common = {
        "mode": args.mode,
        "pvthreshd": args.pvthreshd,
        "start_percent": args.start_percent,
    }
    short = args.start_percent > 0  # a run that may not pay for measuring
    if args.tiny:
        common["min_tokens"] = 100
    if args.mode == AUTO_QUALITY:
        for quality in args.quality:
            named = f"{AUTO_QUALITY}, {quality}"
            yield NodeRun(named, {**common, "quality": quality}, may_stay_dense=True)
        return
    kind = "topk" if args.mode == "manual" else args.mode
    for topk in args.topk:
        name = f"{kind} {topk:g}, pvthreshd {args.pvthreshd:g}"
        yield NodeRun(name, {**common, "topk": topk}, may_stay_dense=short)

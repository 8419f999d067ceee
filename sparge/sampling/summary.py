# SPDX-License-Identifier: Apache-2.0
"""Summary of a run: one long line, and more lines.

Where nothing was sparse the line says why, and what its user can do.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..tune.measured_shape import percent
from ..tune.session_pass import MEASURING
from .result import RunResult
from .verdict import STOPPED, gain, why_nothing

#: Remark where the user asked for the PV filter.
LEFT_OUT = "pvthreshd left out: this GPU is faster and truer without it"

BY_TABLE = "What exact attention would have taken is told by the speed table of this GPU."
BY_RUN = "What exact attention would have taken is told by exact calls of this run."

ONE_STEP_AUTO = (
    "of a run of one step nothing is left after measuring: mode manual with start_percent 0 can "
    "make it sparse"
)
ONE_STEP_MANUAL = "the only step is before start_percent: 0 can make it sparse"


def summary(result: RunResult) -> str:
    tally = result.tally
    tokens = tally.grid_tokens if tally.missing else tally.tokens
    parts = [gain(result), f"{tally.family}, {tokens:,} tokens" if tokens else tally.family]
    if tally.sparse:
        found = result.report.densities
        parts.append(
            f"{tally.sparse} sparse and {tally.dense} dense self-attention calls, "
            f"{100 * found.overall:.1f} % of attention computed; density of sparse calls "
            f"{100 * found.of_sparse_calls:.1f} %{_head_range(result)}"
        )
        parts.extend(_errors(result))
        if any(shape.one_order for shape in result.report.shapes):
            parts.append("measured one token order alone: the dense steps are few or short")
    else:
        why = why_nothing(result)
        if why is STOPPED:
            parts.insert(0, why.told)
        else:
            parts.append(": ".join(filter(None, ["NOTHING WAS SPARSE", why.told])))
        if tally.dense:
            other = "other " if tally.missing else ""
            parts.append(f"{tally.dense} {other}dense self-attention calls")
    if tally.eight_bit:
        parts.append(f"{tally.eight_bit} dense calls in 8 bits, faster here than exact ones")
    if tally.reasons and not tally.missing:
        reasons = (f"{why.rstrip('.')} ({count})" for why, count in tally.reasons.most_common())
        parts.append("dense because: " + ", ".join(reasons))
        parts.append(advice(result))
    if tally.cross:
        parts.append(f"{tally.cross} cross-attention calls (always exact)")
    if tally.filter_left_out:
        parts.append(LEFT_OUT)
    parts.extend(note.rstrip(".") for note in result.notes)
    if result.stopped and not result.stopped_early:
        parts.append("stopped early")
    return "; ".join(filter(None, parts))


def details(result: RunResult) -> str:
    """Line of the report, and below it what was measured of each layer."""
    lines = [summary(result), *result.report.details()]
    if gain(result):
        lines.append(BY_TABLE if result.report.time.by_table else BY_RUN)
    return "\n".join(lines)


def _head_range(result: RunResult) -> str:
    heads = result.report.of_heads("density")
    if not heads.numel():
        return ""
    return f" (heads {percent(heads.min())} to {percent(heads.max())})"


def _errors(result: RunResult) -> Iterator[str]:
    if (error := result.report.mean_error("predicted")) is not None:
        yield f"predicted error {error:.3f}"


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

# SPDX-License-Identifier: Apache-2.0
"""Verdict on a run: two lines that fit the box of a node, one long line for the log, and more.

The first line of the verdict says what the run gained. The second one warns, or gives a reason, or
else says how much of the attention was computed and how far off it was. Where nothing was sparse
the log says why, and what its user can do.
"""

from __future__ import annotations

import textwrap

from ..compiling import has_been_traced
from .heads import MEASURING
from .report import Report, Why, percent

#: Characters of a line.
WIDEST = 40
#: Speedup from which on a run counts as faster.
FASTER = 1.05


STOPPED = Why("stopped before the first sparse step", ("Stopped before the first sparse step", ""))
ONLY_CROSS = "all attention calls were cross-attention"
NOT_RUN = Why("the model did not run", ("The model did not run", ""))


def why_nothing(report: Report) -> Why:
    """Empty where something was sparse, or the reasons of dense calls say why not."""
    counts = report.counts
    if counts.sparse:
        return Why()
    if report.stopped_early:
        return STOPPED
    if counts.passes == 0:
        return NOT_RUN
    if counts.calls == 0:
        return report.words.whole_graph if has_been_traced() else report.words.no_calls
    return report.words.why_replaced(counts.missing) if counts.missing else Why()


def first_reason(report: Report) -> str:
    """The one that counts most of the reasons why calls were dense, if there was any."""
    told, counts = why_nothing(report).told, report.counts
    counted = next((reason for reason, _ in counts.reasons.most_common(1)), "")
    return told or counted or (ONLY_CROSS if counts.cross and not counts.sparse else "")


def verdict(report: Report, widest: int = WIDEST) -> str:
    """One line or two, each of at most `widest` characters."""
    why = why_nothing(report)
    lines = why.lines if why.told else (_first(report), _second(report))
    return short_lines(*lines, widest=widest)


def short_lines(*lines: str, widest: int = WIDEST) -> str:
    """Lines that say something, each cut to `widest` characters."""
    return "\n".join(textwrap.shorten(line, widest, placeholder=" ...") for line in lines if line)


def gain(report: Report) -> str:
    """How much faster the run was than with exact attention; "" where nothing says so."""
    saved = report.time.saved
    if saved is None or report.stopped or report.seconds <= 0:
        return ""
    would = max(0.0, report.seconds + saved)
    speedup = would / report.seconds
    if speedup < FASTER:
        return f"As fast as without: {shown(report.seconds)}"
    return f"Speedup {speedup:.2g}x: {shown(report.seconds)}, not {shown(would)}"


def shown(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _first(report: Report) -> str:
    counts = report.counts
    if report.stopped:
        return "Stopped early"
    sparse = f"{counts.sparse} of {counts.sparse + counts.dense} calls were sparse"
    return gain(report) or (sparse if counts.sparse else "NOTHING WAS SPARSE")


def _second(report: Report) -> str:
    counts = report.counts
    if report.notes:
        return report.notes[0]
    if counts.sparse:
        return _computed(report)
    if 2 * counts.eight_bit > counts.dense:
        return "Nothing skipped, calls in 8 bits"
    return first_reason(report)


def _computed(report: Report) -> str:
    """How much the whole run computed, and how far off it was."""
    share = f"{100 * report.densities.overall:.0f} %"
    error = "" if report.error is None else f", off by {100 * report.error:.0f} %"
    return f"{share} of attention computed{error}"


#: Remark where the user asked for the PV filter.
LEFT_OUT = "pvthreshd left out: without it this GPU is faster and closer to the original"

FORETOLD = "What exact attention would have taken is told by calls that were timed before this run."
BY_RUN = "What exact attention would have taken is told by exact calls of this run."

ONE_STEP_AUTO = (
    "of a run of one step nothing is left after measuring: mode manual with start_percent 0 can "
    "make it sparse"
)
ONE_STEP_MANUAL = "the only step is before start_percent: 0 can make it sparse"


def summary(report: Report) -> str:
    counts = report.counts
    tokens = counts.grid_tokens if counts.missing else counts.tokens
    parts = [gain(report), f"{counts.family}, {tokens:,} tokens" if tokens else counts.family]
    if counts.sparse:
        found = report.densities
        parts.append(
            f"{counts.sparse} sparse and {counts.dense} dense self-attention calls, "
            f"{100 * found.overall:.1f} % of attention computed; density of sparse calls "
            f"{100 * found.of_sparse_calls:.1f} %{_head_range(report)}"
        )
        if report.error is not None:
            parts.append(f"error {report.error:.3f}")
    else:
        why = why_nothing(report)
        if why is STOPPED:
            parts.insert(0, why.told)
        else:
            parts.append(": ".join(filter(None, ["NOTHING WAS SPARSE", why.told])))
        if counts.dense:
            other = "other " if counts.missing else ""
            parts.append(f"{counts.dense} {other}dense self-attention calls")
    if counts.eight_bit:
        parts.append(f"{counts.eight_bit} dense calls in 8 bits, faster here than exact ones")
    if counts.reasons and not counts.missing:
        reasons = (f"{why.rstrip('.')} ({count})" for why, count in counts.reasons.most_common())
        parts.append("dense because: " + ", ".join(reasons))
        parts.append(advice(report))
    if counts.cross:
        parts.append(f"{counts.cross} cross-attention calls (always exact)")
    if counts.filter_left_out:
        parts.append(LEFT_OUT)
    parts.extend(note.rstrip(".") for note in report.notes)
    if report.stopped and not report.stopped_early:
        parts.append("stopped early")
    return "; ".join(filter(None, parts))


def details(report: Report) -> str:
    """Line of the report, and below it what was measured of each layer."""
    lines = [summary(report), *report.details()]
    if gain(report):
        lines.append(FORETOLD if report.time.is_foretold else BY_RUN)
    return "\n".join(lines)


def _head_range(report: Report) -> str:
    heads = report.of_heads("density")
    if not heads.numel():
        return ""
    return f" (heads {percent(heads.min())} to {percent(heads.max())})"


def advice(report: Report) -> str:
    """Change that a user can make, where the reasons of dense calls would send them the wrong
    way.
    """
    if report.counts.sparse or report.steps != 1 or report.stopped_early:
        return ""
    waits = any(why.startswith("before start_percent") for why in report.counts.reasons)
    if report.aim is not None:
        return ONE_STEP_AUTO if waits or MEASURING in report.counts.reasons else ""
    return ONE_STEP_MANUAL if waits else ""

# SPDX-License-Identifier: Apache-2.0
"""Verdict on a run: two lines that fit the box of a node, one long line for the log, and more.

The first line says what the run gained, or why nothing was skipped. The second one says what the
user can do about that, or how much of the attention was computed and how far off it was, or warns.
"""

from __future__ import annotations

from ..compiling import has_been_traced
from ..reasons import Reason
from .report import Report, percent

#: Speedup from which on a run counts as faster.
FASTER = 1.05

STOPPED = Reason("stopped before the first sparse step", "stopped")
NOT_RUN = Reason("the model did not run", "not run")
ONLY_CROSS = Reason("all attention calls were cross-attention", "beside")
WHOLE_GRAPH = Reason(
    "torch.compile with fullgraph leaves no room for sparse attention (turn fullgraph off), or "
    "another attention takes its place",
    "fullgraph",
)
REPLACED = Reason(
    "the self-attention of the video or picture did not come: another node replaces it, or the "
    "model computes it in a way of its own",
    "replaced",
)


def why_nothing(report: Report) -> Reason | None:
    """Reason why nothing was skipped; None where something was."""
    counts = report.counts
    if counts.sparse:
        return None
    if report.stopped_early:
        return STOPPED
    if not counts.passes:
        return NOT_RUN
    if not counts.calls:
        absent = WHOLE_GRAPH if has_been_traced() else report.no_calls
        return report.notes[0] if report.notes else absent
    found = REPLACED if counts.missing else counts.main_reason or ONLY_CROSS
    if found.kind != "before":
        return found
    # A run of one step would measure in it what there is to skip.
    kind = "one step" if report.steps == 1 and report.aim else "before"
    return Reason(f"all steps come {found}", kind)


def verdict(report: Report) -> list[str]:
    """Two lines, and a sentence where there is more to say."""
    why, counts, notes = why_nothing(report), report.counts, report.notes
    if why is not None:
        what, remedy, sentence = why.lines(counts.tokens_of.get(why, 0))
        gained = gain(report)  # by dense calls in 8 bits
        return [gained, what, sentence] if gained else [what, remedy, sentence]
    sparse = f"{counts.sparse} of {counts.sparse + counts.dense} calls were sparse"
    first = "Stopped early" if report.stopped else gain(report) or sparse
    return [first, *notes[0].lines()[1:]] if notes else [first, _computed(report)]


def gain(report: Report) -> str:
    """How much faster the run was than with exact attention; "" where nothing says so."""
    saved = report.time.saved
    if saved is None or report.stopped or report.seconds <= 0:
        return ""
    would = max(0.0, report.seconds + saved)
    speedup = would / report.seconds
    if speedup < FASTER:
        return f"As fast as without: {duration(report.seconds)}"
    return f"Speedup {speedup:.2g}x: {duration(report.seconds)}, not {duration(would)}"


def duration(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _computed(report: Report) -> str:
    """How much the whole run computed, and how far off it was."""
    share = f"{100 * report.densities.overall:.0f} %"
    error = "" if report.error is None else f", off by {100 * report.error:.0f} %"
    return f"{share} of attention computed{error}"


#: Remark where the user asked for the PV filter.
LEFT_OUT = "pvthreshd left out: without it this GPU is faster and closer to the original"


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
        parts.append(f"nothing was skipped: {why_nothing(report)}".rstrip("."))
        if counts.dense:
            other = "other " if counts.missing else ""
            parts.append(f"{counts.dense} {other}dense self-attention calls")
    if counts.eight_bit:
        parts.append(f"{counts.eight_bit} dense calls in 8 bits, faster here than exact ones")
    if counts.reasons and not counts.missing:
        reasons = (f"{why.rstrip('.')} ({count})" for why, count in counts.reasons.most_common())
        parts.append("dense because: " + ", ".join(reasons))
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
    return "\n".join([summary(report), *report.details()])


def _head_range(report: Report) -> str:
    heads = report.of_heads("density")
    if not heads.numel():
        return ""
    return f" (heads {percent(heads.min())} to {percent(heads.max())})"

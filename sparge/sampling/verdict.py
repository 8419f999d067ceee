# SPDX-License-Identifier: Apache-2.0
"""Verdict on a run: two lines that fit the box of a node. The log and the report say the rest.

The first line says what the run gained. The second one warns, or gives a reason, or else says how
much of the attention was computed and how far off it was.
"""

from __future__ import annotations

import textwrap

from ..common.compiling import has_been_traced
from .result import RunResult
from .words import Why

#: Characters of a line.
WIDEST = 40
#: Times as fast from which on a run counts as faster.
FASTER = 1.05


STOPPED = Why("stopped before the first sparse step", ("Stopped before the first sparse step", ""))
ONLY_CROSS = "all attention calls were cross-attention"
NOT_RUN = Why("the model did not run", ("The model did not run", ""))


def why_nothing(result: RunResult) -> Why:
    """Empty where something was sparse, or the reasons of dense calls say why not."""
    tally = result.tally
    if tally.sparse:
        return Why()
    if result.stopped_early:
        return STOPPED
    if tally.forwards == 0:
        return NOT_RUN
    if tally.calls == 0:
        return result.words.whole_graph if has_been_traced() else result.words.no_calls
    return result.words.why_replaced(tally.missing) if tally.missing else Why()


def first_reason(result: RunResult) -> str:
    """The one that counts most of the reasons why calls were dense, if there was any."""
    told, tally = why_nothing(result).told, result.tally
    counted = next((reason for reason, _ in tally.reasons.most_common(1)), "")
    return told or counted or (ONLY_CROSS if tally.cross and not tally.sparse else "")


def verdict(result: RunResult, widest: int = WIDEST) -> str:
    """One line or two, each of at most `widest` characters."""
    why = why_nothing(result)
    lines = why.lines if why.told else (_first(result), _second(result))
    return short_lines(*lines, widest=widest)


def short_lines(*lines: str, widest: int = WIDEST) -> str:
    """Lines that say something, each cut to `widest` characters."""
    return "\n".join(textwrap.shorten(line, widest, placeholder=" ...") for line in lines if line)


def gain(result: RunResult) -> str:
    """How much faster the run was than with exact attention; "" where nothing says so."""
    saved = result.report.time.saved
    if saved is None or result.stopped or result.seconds <= 0:
        return ""
    would = max(0.0, result.seconds + saved)
    times = would / result.seconds
    if times < FASTER:
        return f"As fast as without: {shown(result.seconds)}"
    return f"{times:.2g}x faster: {shown(result.seconds)}, not {shown(would)}"


def shown(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _first(result: RunResult) -> str:
    tally = result.tally
    if result.stopped:
        return "Stopped early"
    sparse = f"{tally.sparse} of {tally.sparse + tally.dense} calls were sparse"
    return gain(result) or (sparse if tally.sparse else "NOTHING WAS SPARSE")


def _second(result: RunResult) -> str:
    tally = result.tally
    if result.notes:
        return result.notes[0]
    if tally.sparse:
        return _computed(result)
    if 2 * tally.eight_bit > tally.dense:
        return "Nothing skipped, calls in 8 bits"
    return first_reason(result)


def _computed(result: RunResult) -> str:
    """How much the whole run computed, and how far off it was."""
    share = f"{100 * result.report.densities.overall:.0f} %"
    found = result.report.mean_error("predicted")
    error = "" if found is None else f", error {100 * found:.0f} %"
    return f"{share} of attention computed{error}"

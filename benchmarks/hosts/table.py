# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/hosts/table.md, of the rows on file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.speed_table import table
from benchmarks.timing import ROOT, read_rows

from .row import Row, Verdict

FILE = ROOT / "benchmarks" / "results" / "hosts.jsonl"
#: Sizes of a call's tensors, which make reasons differ that are the same.
_SIZES = re.compile(r" \(\d+(, \d+)+\)")
_HEAD = (
    "model", "case", "error", "bound", "sparse", "8-bit dense", "left", "sparse at 0.5",
    "share computed",
)  # fmt: skip


def read(path: Path = FILE) -> list[Row]:
    return [Row.read(row) for row in read_rows(path)]


def summary(rows: Sequence[Row]) -> str:
    """A line a host."""
    lines = []
    for host, of_host in _by_host(rows):
        verdicts = Counter(row.verdict for row in of_host)
        sparse = [row for row in of_host if row.verdict is Verdict.TRUE and row.bound]
        nearest = max((row.error / row.bound for row in sparse), default=0.0)
        numbers = (len(of_host), len(sparse), verdicts[Verdict.TRUE] - len(sparse))
        silent = sum(verdicts[verdict] for verdict in Verdict if verdict.is_bad)
        refused = str(verdicts[Verdict.REFUSED])
        counts = [*map(str, numbers), refused, str(silent)]
        lines.append([f"`{host}`", *counts, f"{nearest:.0%}" if sparse else ""])
    head = ("host", "rows", "served", "left to the host", "refused", "silently wrong or dense")
    return table([*head, "largest error of its bound"], lines)


def whole(rows: Sequence[Row]) -> str:
    """A table a host, and the reasons that their rows name by number."""
    reasons = _Reasons()
    parts = []
    for host, of_host in _by_host(rows):
        lines = [_line(row, reasons) for row in of_host]
        parts.append(f"\n### `{host}`\n\n{table(_HEAD, lines)}")
    known = [[str(number), _escaped(text)] for text, number in reasons.numbers.items()]
    return "".join([*parts, f"\n### Reasons\n\n{table(('number', 'reason'), known)}"])


class _Reasons:
    """Numbers of reasons, in the order they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, reason: str) -> int:
        return self.numbers.setdefault(_SIZES.sub("", reason), len(self.numbers) + 1)


def _by_host(rows: Iterable[Row]) -> Iterable[tuple[str, list[Row]]]:
    by_host: dict[str, list[Row]] = {}
    for row in rows:
        by_host.setdefault(row.host, []).append(row)
    return by_host.items()


def _line(row: Row, reasons: _Reasons) -> list[str]:
    named = [row.model, row.case]
    if row.verdict is Verdict.REFUSED:
        return [*named, f"refused [{reasons.number(row.refused)}]", *[""] * (len(_HEAD) - 3)]
    by_number: Counter[int] = Counter()
    for reason, calls in row.left.items():
        by_number[reasons.number(reason)] += calls
    left = ", ".join(f"{calls} [{number}]" for number, calls in by_number.items())
    share = f"{row.fewer_density:.0%}" if row.fewer_sparse else ""
    error, bound = (_number(x) for x in (row.error, row.bound))
    counts = [str(row.sparse), str(row.dense), left, str(row.fewer_sparse)]
    return [*named, error, bound, *counts, share]


def _number(error: float) -> str:
    return f"{error:.2g}" if error else "0"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def origin(path: Path = FILE) -> str:
    """Versions and commit of the rows on file."""
    names = ("torch", "transformers", "diffusers", "commit")
    found = {tuple(row[name] for name in names) for row in read_rows(path)}
    told = (", ".join(map(" ".join, zip(names, values, strict=True))) for values in sorted(found))
    return "\n" + ";\n".join(told) + ".\n"


def tables() -> dict[str, Callable[[], str]]:
    """Tables by the names of their places."""
    return {"hosts-summary": lambda: summary(read()) + origin(), "hosts": lambda: whole(read())}

# SPDX-License-Identifier: Apache-2.0
"""Compares tiny models with sparse attention in their hosts with the models' own attention.

python -m benchmarks.hosts [--only WORD ...] [--out FILE]

It runs on the CPU for a quarter of an hour and needs transformers, diffusers and accelerate. A line
a row; `benchmarks.hosts.row` says what is thought of it. Ends with 1 where a row is silently wrong
or dense, and writes nothing then. --only: cases whose model or name has a word in it; none is
written.
`python -m benchmarks.report` makes docs/hosts/table.md of the rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import commit, write_rows
from sparge.tune.ways import REFERENCE_VARIABLE

from .measure import rows_of
from .row import Row, Verdict
from .table import FILE


def line(row: Row) -> str:
    named = f"{row.verdict.value:16} {row.host} | {row.model} | {row.case}"
    if row.refused:
        return f"{named} | {row.refused}"
    return (
        f"{named} | error {row.error:.5f}, bound {row.bound:.5f} | {row.sparse} sparse, "
        f"{row.dense} dense, left {dict(row.left)} | {row.fewer_sparse} sparse at 0.5, "
        f"{row.fewer_density:.0%}"
    )


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "diffusers")}


def silence() -> None:
    import diffusers
    import transformers

    warnings.filterwarnings("ignore")
    for package in (diffusers, transformers):
        package.logging.set_verbosity_error()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    os.environ[REFERENCE_VARIABLE] = "1"
    torch.set_num_threads(1)  # of tiny tensors
    silence()
    from .suite import cases  # which imports diffusers

    facts: dict[str, Any] = {"commit": commit(), **versions()}
    rows: list[Row] = []
    for case, hosts in cases():
        title = f"{case.model}, {case.name}"
        if options.only and not any(word in title for word in options.only):
            continue
        for row in rows_of(case, hosts):
            print(line(row), flush=True)
            rows.append(row)
    return finish(rows, facts, None if options.only else options.out)


def finish(rows: Sequence[Row], facts: dict[str, Any], out: Path | None) -> int:
    """Tells the sums, and writes the rows where none is bad. Gives the exit code."""
    verdicts = Counter(row.verdict for row in rows)
    print(", ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in Verdict))
    bad = [row for row in rows if row.verdict.is_bad]
    for row in bad:
        print(line(row), file=sys.stderr)
    if not bad and out is not None:
        write_rows(out, [asdict(row) | facts for row in rows])
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

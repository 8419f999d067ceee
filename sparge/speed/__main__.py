# SPDX-License-Identifier: Apache-2.0
"""Prints the speed tables that are kept on this machine, and what its GPUs take for three models.

    python -m sparge.speed [--anew]

--anew: removes them; the next run of the node measures anew. The calls of the three models are
measured now, in seconds, and printed as a block to post: nobody has measured most cards.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import datetime, timezone

import torch

from ..kernels.device import capabilities
from . import post
from .kept import kept_tables, path_of, speed_table
from .table import Size, SpeedTable

#: Tokens and heads of the lines.
SHOWN = ((4608, 24), (17776, 48), (44776, 24))
DENSITY = 0.2


def lines(table: SpeedTable, now: datetime) -> Iterator[str]:
    """Yields what a user may want to know of a table."""
    age = (now - datetime.fromisoformat(table.created)).days
    path = path_of(dict(table.facts))
    kept = f"kept in {path}" if path and path.exists() else "not kept"
    yield f"{table.facts['gpu']}, measured {table.created} ({age} days ago), {kept}"
    yield "  " + ", ".join(f"{name} {fact}" for name, fact in table.facts.items() if name != "gpu")
    for head_dim, times in sorted(table.by_head_dim.items()):
        yield f"  head_dim {head_dim}: formulas fit within {times.margin:.0%}"
        for tokens, heads in SHOWN:
            size = Size(tokens, heads, head_dim)
            cells = {
                "exact": times.exact.seconds(size),
                "8-bit dense": times.eight_bit.seconds(size),
                f"sparse at {DENSITY:.0%}": times.sparse_seconds(size, DENSITY, pooled=1.0),
            }
            shown = ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in cells.items())
            yield f"    {tokens:,} tokens, {heads} heads: {shown}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--anew", action="store_true")
    options = parser.parse_args(arguments)
    kept = kept_tables()
    if options.anew:
        for path, _ in kept:
            path.unlink(missing_ok=True)
            print(f"{path} is gone; the next run measures anew.")
        return
    now = datetime.now(timezone.utc)
    for _, table in kept:
        print("\n".join(lines(table, now)))
    known = [table for _, table in kept]
    measured = 0
    for device in (torch.device("cuda", n) for n in range(torch.cuda.device_count())):
        table = speed_table(device)
        if table is None:
            continue
        measured += 1
        if table not in known:
            print("\n".join(lines(table, now)))
        print(f"\nPlease post these lines: {post.where()}\n")
        for line in post.block(table, device):
            print(line, flush=True)
    if not (kept or measured):
        print(f"No table: {capabilities(torch.device('cuda')).reason or 'Memory is full.'}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Times work on the GPU with events, and says where and when it was measured."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import sparge

ROOT = Path(__file__).resolve().parent.parent
FEWEST, MOST = 3, 20  # calls that a median is taken of
CLOCKS_A_MS = 2_000_000  # of an H200; where clocks reach 3 GHz, a sleep is a third shorter
LONGEST_SLEEP = 50.0  # ms


def gpu_sleep(ms: float) -> None:
    """Holds the current stream up for about so long, in which the host queues what comes next."""
    torch.cuda._sleep(round(ms * CLOCKS_A_MS))


def median_ms(
    work: Callable[[], object], repeats: int = 10, warm_up: int = 3, with_host: bool = False
) -> float:
    """Median milliseconds that one call of `work` takes the GPU, of calls in a row on the current
    stream; `with_host`: also that the GPU waits for the host within a call.

    Short calls, in which it would wait, are queued once more while it sleeps. Before long ones it
    does not: the host runs ahead by itself, and a GPU that rested is faster for a while. Waiting
    counts in any case where `work` itself waits for the GPU, and where the host takes longer than
    LONGEST_SLEEP to queue the calls.

    Inputs are expected to exceed the L2 several times, so repeats do not measure the cache.
    """
    for _ in range(warm_up):
        work()
    started = time.perf_counter()
    spans = _queued(work, repeats)
    host_ms = 1000 * (time.perf_counter() - started)
    caught_up = spans[-1][0].query()  # the GPU began the last call before the host had queued it
    if caught_up and host_ms < LONGEST_SLEEP and not with_host:
        gpu_sleep(min(2 * host_ms, LONGEST_SLEEP))  # twice: hosts jitter, and clocks differ
        spans = _queued(work, repeats)
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in spans)


def _queued(work: Callable[[], object], repeats: int) -> list[tuple[Any, Any]]:
    """Events around each call."""
    spans = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in spans:
        start.record()
        work()
        end.record()
    return spans


def median_within(work: Callable[[], object], seconds: float) -> tuple[float, int]:
    """Median milliseconds, and the number of calls that it is of: as many as fit, within FEWEST and
    MOST."""
    once = median_ms(work, repeats=1, warm_up=1)
    repeats = min(MOST, max(FEWEST, int(1000 * seconds / once)))
    return median_ms(work, repeats, warm_up=repeats // 5), repeats


class Allowance:
    """Seconds of a whole run, shared out evenly over the cases that are still to come."""

    def __init__(self, seconds: float, cases: int) -> None:
        self._end = time.monotonic() + seconds
        self._cases = cases

    def next(self) -> float:
        """Seconds for the next case; 0 when the time is over."""
        left = max(0.0, self._end - time.monotonic()) / max(1, self._cases)
        self._cases -= 1
        return left


def gpu_name() -> str:
    return torch.cuda.get_device_name()


def commit() -> str:
    """Commit of this checkout, with "+" when files differ from it; "unknown" outside git."""
    try:
        run = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=10"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def require_kernels() -> None:
    """Raises SystemExit with the reason where this machine cannot run the kernels."""
    capability = sparge.capabilities("cuda")
    if not capability.usable:
        raise SystemExit(f"Nothing to time: {capability.reason}")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object a line; in a file called `.json` they are the elements of an array."""
    lines = [json.dumps(row, allow_nan=False) for row in rows]
    array = path.suffix == ".json"
    text = "[\n" + ",\n".join(lines) + "\n]\n" if array else "".join(f"{x}\n" for x in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def add_row(row: Mapping[str, Any], path: Path | None) -> None:
    """Prints a row as a line of JSON, and adds it to a file where one is given."""
    line = json.dumps(row)
    print(line, flush=True)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads what `write_rows` wrote."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text if path.suffix == ".json" else f"[{','.join(text.splitlines())}]")

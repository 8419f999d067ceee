# SPDX-License-Identifier: Apache-2.0
"""Times work on the GPU with events, and says where and when it was measured."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def median_ms(work: Callable[[], object], repeats: int = 10, warm_up: int = 3) -> float:
    """Median milliseconds of one call of `work` on the current stream.

    Inputs are expected to exceed the L2 several times, so repeats do not measure the cache.
    """
    for _ in range(warm_up):
        work()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def gpu_name() -> str:
    return torch.cuda.get_device_name()


def commit() -> str:
    """The commit of this checkout, with "+" when files differ from it; "unknown" outside git."""
    try:
        run = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=10"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

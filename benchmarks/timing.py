# SPDX-License-Identifier: Apache-2.0
"""Times work on the GPU with events, and says where and when it was measured."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import sparge

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


def require_kernels() -> None:
    """Raises SystemExit with the reason where this machine cannot run the kernels."""
    capability = sparge.capabilities("cuda")
    if not capability.usable:
        raise SystemExit(f"Nothing to time: {capability.reason}")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

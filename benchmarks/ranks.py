# SPDX-License-Identifier: Apache-2.0
"""Processes that share a sequence, one a GPU (NCCL) or all on the CPU (gloo), and options of
scripts that time them."""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.timing import require_kernels

#: Work of one rank: it is given its device and what `run_ranks` was given.
Work = Callable[..., None]


def run_ranks(work: Work, kind: str, ranks: int, *given: Any) -> None:
    """Runs `work` in as many processes, in one group; waits for them, and raises what one raised.

    kind: "cuda" or "cpu".
    """
    # Multicast over NVLink needs rights that containers often lack.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(_rank, (work, kind, ranks, f"tcp://127.0.0.1:{port}", given), nprocs=ranks)


def _rank(
    rank: int, work: Work, kind: str, ranks: int, address: str, given: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    options: dict[str, Any] = {}
    if kind == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, address, rank=rank, world_size=ranks, **options)
    # A rank that raises leaves the group as it is: NCCL would wait there for the others.
    with torch.inference_mode():
        work(device, *given)
    dist.barrier()
    dist.destroy_process_group()


def median_on_ranks(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median ms of this rank. The number of calls is fixed: every rank makes the same ones."""
    for _ in range(3 if device.type == "cuda" else 0):
        work()
    dist.barrier()
    if device.type != "cuda":
        spans = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            spans.append(1000 * (time.perf_counter() - started))
        return statistics.median(spans)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def all_ranks(value: float, device: torch.device) -> list[float]:
    """That number of every rank."""
    own = torch.tensor([value], dtype=torch.float64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [float(each) for each in found]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topk", nargs="+", type=float, default=[0.3, 0.2])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10, help="calls that a median is of")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="little sizes, for the script itself")
    parser.add_argument("--commit", default="", help="in a copy of the repository without history")
    parser.add_argument("--out", type=Path, help="file that rows are added to")


def check_options(options: argparse.Namespace) -> None:
    """Ends the script where there are no kernels, or fewer GPUs than ranks."""
    if options.device == "cuda":
        require_kernels()
        if (found := torch.cuda.device_count()) < options.ranks:
            raise SystemExit(f"{options.ranks} ranks need as many GPUs; torch finds {found}.")

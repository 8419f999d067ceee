# SPDX-License-Identifier: Apache-2.0
"""Crossover: tokens from which, and densities below which, sparse calls are faster than dense.

    python -m benchmarks.crossover [--seconds 150] [--out FILE]  # measures on this GPU, then fits
    python -m benchmarks.crossover --fit FILE                    # writes sparge/speed/rates.json

The dense calls are PyTorch's. One JSON object for each size, case and asked density: tokens, heads,
head_dim, case, density (reached), pv_filter, pooled (share of the heads that add pseudo-keys; null:
no head settings), ms (of the GPU), host_ms (until the host is back), held_out (a model's shape: the
fit is judged by it, not made from it; missing otherwise), gpu, arch, torch, commit. The dense cases
are PyTorch's kernels; torch_takes is the one that it takes by itself (ComfyUI asks for flash
first). A call waits in the queue while the GPU multiplies matrices, as it does in a model, so that
ms holds nothing of the host's and is at a model's clocks. Before a size is timed, calls that drop
nothing are compared with float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparge import AttentionStats, SparsePolicy, TokenGrid, capabilities, cube_order
from sparge.kernels import warm
from sparge.speed.worth import TORCH_KERNELS, torch_kernel

from . import crossover_fit
from .attention import specs
from .budgets import Case, cases
from .inputs import draw
from .model_load import ModelLoad
from .shapes import SHAPES, Shape
from .speed_rows import errors
from .timing import ROOT, Allowance, commit, gpu_name, read_rows, require_kernels, write_rows

DENSITIES = (1.0, 0.5, 0.3, 0.2, 0.1)
HEADS, HEAD_DIMS = (24, 40), (64, 128)
#: Grids: Flux at 1024 x 1024 among sizes that grow twofold.
GRIDS = (
    *(TokenGrid(frames, 32, 32) for frames in (1, 2, 4)),
    SHAPES["flux1k"].grid,
    *(TokenGrid(frames, 32, 32) for frames in (8, 16, 32)),
)
TINY = (TokenGrid(1, 16, 16), TokenGrid(1, 16, 16, prefix=64))
HELD_OUT = ("cogx2b", "cogx5b", "wan480", "mochi")
PV_FILTER = 15.0  # the node's default
MOST_ERROR = 0.02  # of 8 bits; a kernel that is wrong is off by more

Qkv = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Times:
    """Medians in milliseconds."""

    ms: float
    host_ms: float


def measure(work: Callable[[], object], seconds: float, load: ModelLoad | None) -> Times:
    """Times 3 to 9 calls, as many as fit, each after the load. Without a load, on a machine without
    a GPU, both times are the host's."""
    work()
    repeats = _repeats(work, seconds, load)
    host, events = [], []
    if load:
        load.heat_up()
    for _ in range(repeats):
        if load:
            load()
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            events[-1][0].record()
        started = time.perf_counter()
        work()
        host.append(1000 * (time.perf_counter() - started))
        if load:
            events[-1][1].record()
    host_ms = statistics.median(host)
    if not load:
        return Times(host_ms, host_ms)
    torch.cuda.synchronize()
    return Times(statistics.median(start.elapsed_time(end) for start, end in events), host_ms)


def _repeats(work: Callable[[], object], seconds: float, load: ModelLoad | None) -> int:
    started = time.perf_counter()
    if load:
        load()
    work()
    if load:
        torch.cuda.synchronize()
    return min(9, max(3, int(seconds / (time.perf_counter() - started))))


def shapes(grids: tuple[TokenGrid, ...], all_heads: tuple[int, ...]) -> list[Shape]:
    """Shapes to time. The small ones, where the crossover is, come first."""
    return [
        Shape(f"{grid.tokens} x {heads} x {head_dim}", heads, grid.tokens, head_dim, grid)
        for grid in grids
        for heads in all_heads
        for head_dim in HEAD_DIMS
    ]


def sparse_cases(shape: Shape, density: float, device: torch.device) -> list[Case]:
    """Cases as the node calls: in manual mode with and without the PV filter, and in the auto
    modes."""
    order = cube_order(shape.grid).on(device)
    manual = Case("manual", SparsePolicy(topk=density), order)
    by_name = {case.name: case for case in cases(shape.grid, shape.heads, density, device)}
    return [
        manual,
        replace(
            manual, name="manual, PV filter", policy=replace(manual.policy, pvthreshd=PV_FILTER)
        ),
        replace(by_name["walks, spread, by error"], name="auto"),
    ]


def check(shape: Shape, qkv: Qkv) -> None:
    """Raises SystemExit where a result is wrong: its time would mean nothing."""
    for case in sparse_cases(shape, 1.0, qkv[0].device)[:2]:
        _, error = errors(case.attend(qkv), *qkv, None)
        if error > MOST_ERROR:
            raise SystemExit(f"{shape.name}, {case.name}: off by {error:.3f} with nothing dropped")


def dense_kernels(on_gpu: bool) -> dict[str, SDPBackend]:
    return TORCH_KERNELS if on_gpu else {"flash": SDPBackend.FLASH_ATTENTION}


def time_dense(
    shape: Shape, qkv: Qkv, allowance: Allowance, load: ModelLoad | None
) -> Iterator[dict[str, Any]]:
    takes = torch_kernel(*qkv)
    for name, backend in dense_kernels(qkv[0].is_cuda).items():
        with sdpa_kernel(backend):
            times = measure(lambda: comfyui_dense(*qkv), allowance.next(), load)
        yield row(shape, name, 1.0, 1.0, times, torch_takes=takes)


def comfyui_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention between heads as models hold them and a result as they expect it."""
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def time_sparse(
    shape: Shape, qkv: Qkv, allowance: Allowance, load: ModelLoad | None
) -> Iterator[dict[str, Any]]:
    for asked in DENSITIES:
        for case in sparse_cases(shape, asked, qkv[0].device):
            seconds = allowance.next()
            if seconds == 0:
                continue
            stats = AttentionStats(qkv[0].device)
            case.attend(qkv, stats=stats)
            pooled = float((case.budget.gain > 0).float().mean()) if case.budget else None
            times = measure(lambda case=case: case.attend(qkv, out_layout="NHD"), seconds, load)
            more = {"pv_filter": case.policy.pv_filter, "pooled": pooled}
            yield row(shape, case.name, asked, stats.density, times, **more)


def row(
    shape: Shape, case: str, asked: float, density: float, times: Times, **more: Any
) -> dict[str, Any]:
    return {
        "tokens": shape.tokens,
        "heads": shape.heads,
        "head_dim": shape.head_dim,
        "case": case,
        "asked_density": asked,
        "density": round(density, 4),
        **more,
        "ms": round(times.ms, 4),
        "host_ms": round(times.host_ms, 4),
    }


def measure_all(sizes: list[Shape], device: str, seconds: float, out: Path, facts: dict) -> None:
    a_size = len(dense_kernels(device == "cuda")) + 3 * len(DENSITIES)
    allowance = Allowance(seconds, len(sizes) * a_size)
    rows: list[dict[str, Any]] = []
    load = ModelLoad.on(device) if device == "cuda" else None
    for shape in sizes:
        qkv = draw(shape, device)
        check(shape, qkv)
        for timed in (time_dense, time_sparse):
            for found in timed(shape, qkv, allowance, load):
                held_out = {"held_out": True} if shape.name in HELD_OUT else {}
                rows.append(found | held_out | facts)
                print(json.dumps(rows[-1]), flush=True)
        write_rows(out, rows)  # after each size, so that a run cut short leaves something
        del qkv
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    missing = len(sizes) * a_size - len(rows)
    print(f"# {len(rows)} rows in {out}" + f", {missing} missed for lack of time" * (missing > 0))


def prepare() -> str:
    """Compiles the kernels that are timed; returns the architecture."""
    require_kernels()
    arch = capabilities("cuda").arch
    warm("cuda", specs(arch, set(HEAD_DIMS)))
    return arch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=150, help="of timing, but compiling")
    parser.add_argument("--tiny", action="store_true", help="without a GPU, to try this script")
    parser.add_argument("--commit", default=commit(), help="where the checkout cannot tell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/new_crossover.jsonl")
    parser.add_argument("--fit", type=Path, help="measure nothing: write the rates of these rows")
    options = parser.parse_args()
    if options.fit is not None:
        crossover_fit.write(read_rows(options.fit))
        return
    arch = "" if options.tiny else prepare()
    facts = {"gpu": "none" if options.tiny else gpu_name(), "arch": arch}
    facts |= {"torch": torch.__version__, "commit": options.commit}
    device = "cpu" if options.tiny else "cuda"
    held_out = [SHAPES[name] for name in HELD_OUT]
    sizes = shapes(TINY, (2,)) if options.tiny else [*shapes(GRIDS, HEADS), *held_out]
    measure_all(sizes, device, options.seconds, options.out, facts)
    crossover_fit.show(read_rows(options.out))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Times of calls and of measurements of heads by their size, for the rates of sparge/speed.

    python -m benchmarks.rates calls [--seconds 150] [--out FILE]
    python -m benchmarks.rates samples [--seconds 90] [--out FILE]
    python -m benchmarks.rates calls|samples --fit FILE    # writes sparge/speed/rates.json

One JSON object for each size and case, with tokens, heads, head_dim, ms (of the GPU), host_ms
(until the host is back), gpu, torch, commit.

Of calls also case, asked_density, density (reached), pv_filter, pooled (share of the heads that add
pseudo-keys; null: no head settings), arch and held_out (a model's shape: the fit is judged by it,
not made from it; missing otherwise). The dense cases are PyTorch's kernels; torch_takes is the one
that it takes by itself (ComfyUI asks for flash first). A call waits in the queue while the GPU
multiplies matrices, as it does in a model, so that ms holds nothing of the host's and is at a
model's clocks. Before a size is timed, calls that drop nothing are compared with float32.

Of measurements (samples) also walks (token orders), calls (number of usual measurements whose query
blocks it covers), row_step (one in so many rows is compared; 2 where it is missing) and dense_ms
(of a dense call of that size, by each kernel of PyTorch's). The GPU sleeps until the host has
queued the measurement (docs/experiments.md, Milliseconds of a measurement). The fit takes rows with
calls 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparge import AttentionStats, SparsePolicy, TokenGrid, capabilities, cube_order, grid_order
from sparge.kernels import warm
from sparge.speed.worth import TORCH_KERNELS, torch_kernel
from sparge.tune import Measurement, Workload, measure_for

from . import rates_fit, timing
from .attention import specs
from .cases import Case, spread
from .inputs import draw
from .model_load import ModelLoad, loaded_times
from .shapes import SHAPES, Shape
from .speed_rows import errors
from .timing import ROOT, Allowance, gpu_sleep, median_ms, write_rows

DENSITIES = (1.0, 0.5, 0.3, 0.2, 0.1)
HEADS, HEAD_DIMS = (24, 40), (64, 128)
GRIDS = tuple(TokenGrid(frames, 32, 32) for frames in (1, 2, 4, 8, 16, 32))
TINY = (TokenGrid(1, 16, 16),)
HELD_OUT = ("cogx2b", "cogx5b", "wan480", "mochi")
PV_FILTER = 15.0  # the node's default
MOST_ERROR = 0.02  # of 8 bits; a kernel that is wrong is off by more
#: Token orders and calls of a measurement. What more query blocks cost hardly depends on the
#: orders.
SAMPLES = ((1, 1), (2, 1), (3, 1), (3, 2))
HEAD_START = 60.0  # ms, twice what the host takes for a measurement
FEWEST, MOST = 3, 9  # calls that a median is taken of

Qkv = tuple[Tensor, Tensor, Tensor]
Row = dict[str, Any]


def sizes_of(grids: tuple[TokenGrid, ...], all_heads: tuple[int, ...]) -> list[Shape]:
    """Shapes to time. The small ones, where the crossover is, come first."""
    return [
        Shape(f"{grid.tokens} x {heads} x {head_dim}", heads, grid.tokens, head_dim, grid)
        for grid in grids
        for heads in all_heads
        for head_dim in HEAD_DIMS
    ]


def timed(
    work: Callable[[], object], seconds: float, before: Callable[[], object] | None
) -> dict[str, float]:
    """Medians of FEWEST to MOST calls, as many as fit, each queued behind `before`."""
    started = time.perf_counter()
    for each in (work, before or work):
        each()
    if before:
        torch.cuda.synchronize()
    repeats = int(seconds / (time.perf_counter() - started))
    ms, host_ms = loaded_times(work, before, min(MOST, max(FEWEST, repeats)))
    return {"ms": round(ms, 4), "host_ms": round(host_ms, 4)}


def sparse_cases(shape: Shape, density: float, device: torch.device) -> list[Case]:
    """Cases as the node calls: in manual mode with and without the PV filter, and in the auto
    modes."""
    manual = Case("manual", SparsePolicy(topk=density), cube_order(shape.grid).on(device))
    filtered = replace(manual.policy, pvthreshd=PV_FILTER)
    return [
        manual,
        replace(manual, name="manual, PV filter", policy=filtered),
        spread("auto", shape.grid, shape.heads, density, device),
    ]


def check(shape: Shape, qkv: Qkv) -> None:
    """Raises SystemExit where a result is wrong: its time would mean nothing."""
    for case in sparse_cases(shape, 1.0, qkv[0].device)[:2]:
        _, error = errors(case.attend(qkv), *qkv, None)
        if error > MOST_ERROR:
            raise SystemExit(f"{shape.name}, {case.name}: off by {error:.3f} with nothing dropped")


def dense_kernels(on_gpu: bool) -> dict[str, SDPBackend]:
    return TORCH_KERNELS if on_gpu else {"flash": SDPBackend.FLASH_ATTENTION}


def time_calls(shape: Shape, qkv: Qkv, allowance: Allowance) -> Iterator[Row]:
    """Times dense calls, between heads as models hold them and a result as they expect it, and
    sparse ones."""
    check(shape, qkv)
    device = qkv[0].device
    load = ModelLoad.on(device) if device.type == "cuda" else None
    more = {"held_out": True} if shape.name in HELD_OUT else {}
    for name, backend in dense_kernels(qkv[0].is_cuda).items():
        with sdpa_kernel(backend):
            ms = timed(
                lambda: scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2),
                allowance.next(),
                load,
            )
        case = {"case": name, "asked_density": 1.0, "density": 1.0}
        yield case | {"torch_takes": torch_kernel(*qkv)} | ms | more
    for asked in DENSITIES:
        for case in sparse_cases(shape, asked, device):
            seconds = allowance.next()
            if seconds == 0:
                continue
            stats = AttentionStats(device)
            case.attend(qkv, stats=stats)
            ms = timed(partial(case.attend, qkv, out_layout="NHD"), seconds, load)
            yield {
                "case": case.name,
                "asked_density": asked,
                "density": round(stats.density, 4),
                "pv_filter": case.policy.pv_filter,
                "pooled": float((case.head_settings.pool_weight > 0).float().mean())
                if case.head_settings
                else None,
                **ms,
                **more,
            }


def time_measurements(shape: Shape, qkv: Qkv, allowance: Allowance) -> Iterator[Row]:
    device = qkv[0].device
    dense_ms = {}
    for name, backend in TORCH_KERNELS.items() if device.type == "cuda" else ():
        with sdpa_kernel(backend):
            dense_ms[name] = round(median_ms(partial(scaled_dot_product_attention, *qkv), 3, 1), 4)
    for order_kinds, calls in SAMPLES:
        measurement = Measurement.begin(
            layers=1,
            heads=shape.heads,
            workload=Workload(grid_order(shape.grid)),
            order_kinds=range(order_kinds),
            measure=measure_for(device),
            device=device,
        )
        measure = partial(measurement.add, 0, *qkv, calls=calls)
        if seconds := allowance.next():
            found = {"walks": order_kinds, "calls": calls, "row_step": measurement.row_step}
            ms = timed(measure, seconds, _sleep if device.type == "cuda" else None)
            yield found | ms | {"dense_ms": dense_ms}


def _sleep() -> None:
    torch.cuda.synchronize()
    gpu_sleep(HEAD_START)


#: Function, models' shapes, and cases a size, by what is measured.
KINDS = {
    "calls": (time_calls, HELD_OUT, len(TORCH_KERNELS) + 3 * len(DENSITIES)),
    "samples": (time_measurements, ("cogx2b", "cogx5b", "wan480", "mochi", "wan720"), len(SAMPLES)),
}


def measure_all(what: str, tiny: bool, seconds: float, out: Path, facts: Row) -> None:
    time_them, models, cases = KINDS[what]
    # Flux at 1024 x 1024 stands among sizes that grow twofold; measurements have no tiny ones.
    grids = (*GRIDS[:3], SHAPES["flux1k"].grid, *GRIDS[3:]) if what == "calls" else GRIDS[2:5]
    sizes = [*sizes_of(grids, HEADS), *(SHAPES[name] for name in models)]
    if tiny:
        sizes = sizes_of(TINY, (2,))
    allowance = Allowance(seconds, len(sizes) * cases)
    rows: list[Row] = []
    for shape in sizes:
        named = {name: getattr(shape, name) for name in ("tokens", "heads", "head_dim")}
        for found in time_them(shape, draw(shape, "cpu" if tiny else "cuda"), allowance):
            rows.append(named | found | facts)
            print(json.dumps(rows[-1]), flush=True)
        write_rows(out, rows)  # after each size, so that a run cut short leaves something
        gc.collect()
        if not tiny:
            torch.cuda.empty_cache()
    print(f"# {len(rows)} rows in {out}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("--seconds", type=float, default=150, help="of timing, but compiling")
    parser.add_argument("--tiny", action="store_true", help="without a GPU, to try this script")
    parser.add_argument("--commit", default=timing.commit(), help="where the checkout cannot tell")
    parser.add_argument("--out", type=Path, help="by default new_WHAT.jsonl of the results")
    parser.add_argument("--fit", type=Path, help="measure nothing: write the rates of these rows")
    options = parser.parse_args(arguments)
    if options.fit is not None:
        write = rates_fit.write_calls if options.what == "calls" else rates_fit.write_measurements
        write(timing.read_rows(options.fit))
        return
    facts = {"gpu": "none", "arch": ""}
    if not options.tiny:
        timing.require_kernels()
        facts = {"gpu": timing.gpu_name(), "arch": capabilities("cuda").arch}
        warm("cuda", specs(facts["arch"], set(HEAD_DIMS)))
    facts |= {"torch": torch.__version__, "commit": options.commit}
    out = options.out or ROOT / "benchmarks" / "results" / f"new_{options.what}.jsonl"
    measure_all(options.what, options.tiny, options.seconds, out, facts)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Cost of a measurement of heads, by its size and the token orders that it covers.

    python -m benchmarks.sample_cost [--seconds 90] [--out FILE]   # measures on this GPU, then fits
    python -m benchmarks.sample_cost --fit FILE                    # writes sparge/speed/rates.json

One JSON object for each size and number of token orders: tokens, heads, head_dim, walks (token
orders), calls (number of usual measurements whose query blocks it covers), row_step (one in so many
rows is compared; 2 where it is missing), ms (of the GPU, which sleeps until the host has queued the
measurement: docs/experiments.md, Milliseconds of a measurement), host_ms, dense_ms (of a
dense call of that size, by each kernel of PyTorch's), gpu, torch, commit. The fit needs the first
four, ms, host_ms and gpu; it is one of least squares of relative errors for each head_dim, of the
rows with calls 1, for the GPU and for the host. The table of measurements beside dense calls
is printed with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparge import TokenGrid, grid_order
from sparge.speed.sample_cost import MORE_BLOCKS, SampleRates, sample_terms
from sparge.speed.worth import RATES_FILE, TORCH_KERNELS
from sparge.tune import Calibration, Workload, measure_for

from .crossover import shapes
from .crossover_fit import FEWEST_TOKENS, least_squares, rounded
from .inputs import draw
from .sample_table import samples_table
from .shapes import SHAPES, Shape
from .timing import (
    ROOT,
    Allowance,
    commit,
    gpu_name,
    gpu_sleep,
    median_ms,
    read_rows,
    require_kernels,
    write_rows,
)

Row = Mapping[str, Any]

MODELS = ("cogx2b", "cogx5b", "wan480", "mochi", "wan720")
GRIDS = (TokenGrid(4, 32, 32), TokenGrid(8, 32, 32), TokenGrid(16, 32, 32))
TINY = (TokenGrid(4, 8, 8), TokenGrid(4, 8, 8, prefix=64))
#: Token orders and calls of a measurement. What more query blocks cost hardly depends on the
#: orders.
CASES = ((1, 1), (2, 1), (2, 2))
HEAD_START = 60.0  # ms, twice what the host takes for a measurement
FEWEST, MOST = 3, 9  # measurements that a median is taken of


def time_samples(shape: Shape, device: str, allowance: Allowance) -> Iterator[dict[str, Any]]:
    qkv = draw(shape, device)
    dense, dense_ms = scaled_dot_product_attention(*qkv), _dense_ms(qkv)
    for walks, calls in CASES:
        calibration = Calibration.begin(
            layers=1,
            heads=shape.heads,
            workload=Workload(grid_order(shape.grid)),
            walks=range(walks),
            measure=measure_for(device),
            device=device,
        )
        seconds = allowance.next()
        if seconds == 0:
            continue
        ms, host_ms = _median_ms(calibration, qkv, dense, calls, seconds)
        yield {
            "tokens": shape.tokens,
            "heads": shape.heads,
            "head_dim": shape.head_dim,
            "walks": walks,
            "calls": calls,
            "row_step": calibration.row_step,
            "ms": round(ms, 4),
            "host_ms": round(host_ms, 4),
            "dense_ms": dense_ms,
        }


def _dense_ms(qkv: Sequence[Tensor]) -> dict[str, float]:
    """Milliseconds of each of PyTorch's kernels, on a GPU."""
    found = {}
    if qkv[0].is_cuda:
        for name, backend in TORCH_KERNELS.items():
            with sdpa_kernel(backend):
                found[name] = round(median_ms(partial(scaled_dot_product_attention, *qkv), 3, 1), 4)
    return found


def _median_ms(
    calibration: Calibration, qkv: Sequence[Tensor], dense: Tensor, calls: int, seconds: float
) -> tuple[float, float]:
    """Median milliseconds of the GPU, without a GPU of the host, and of the host."""
    on_gpu = dense.is_cuda
    q, k, v = qkv

    def sample() -> None:
        calibration.sample(0, q, k, v, dense=dense, calls=calls)

    sample()  # compiles and copies to the device what is made once
    host, spans = [], []
    end = time.monotonic() + seconds
    while len(host) < FEWEST or (len(host) < MOST and time.monotonic() < end):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * on_gpu)]
        if on_gpu:
            torch.cuda.synchronize()
            gpu_sleep(HEAD_START)
            events[0].record()
        started = time.perf_counter()
        sample()
        host.append(1000 * (time.perf_counter() - started))
        if on_gpu:
            events[1].record()
            torch.cuda.synchronize()
            spans.append(events[0].elapsed_time(events[1]))
    return statistics.median(spans or host), statistics.median(host)


def measure_all(sizes: list[Shape], device: str, seconds: float, out: Path, facts: Row) -> None:
    allowance = Allowance(seconds, len(sizes) * len(CASES))
    rows: list[dict[str, Any]] = []
    for shape in sizes:
        for found in time_samples(shape, device, allowance):
            rows.append(found | dict(facts))
            print(json.dumps(rows[-1]), flush=True)
        write_rows(out, rows)  # after each size, so that a run cut short leaves something
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    print(f"# {len(rows)} of {len(sizes) * len(CASES)} rows in {out}")


def fit(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Rates by head_dim, as rates.json has them."""
    found = {}
    for head_dim in sorted({row["head_dim"] for row in rows}):
        fitted = _fitted([row for row in rows if row["head_dim"] == head_dim])
        found[str(head_dim)] = {**_solve(fitted, "ms"), "host": _solve(fitted, "host_ms")}
    return found


def _solve(fitted: Sequence[Row], field: str) -> dict[str, float]:
    terms = [sample_terms(_of_heads(row), row["walks"]) for row in fitted]
    names = list(terms[0])
    times = np.array([row[field] / 1000 for row in fitted])
    matrix = np.array([[term[name] for name in names] for term in terms]) / times[:, None]
    rates = least_squares(matrix, np.ones(len(fitted)))
    return {name: rounded(float(rate)) for name, rate in zip(names, rates, strict=True)}


def _fitted(rows: Sequence[Row]) -> list[Row]:
    alone = [row for row in rows if row.get("calls", 1) == 1]
    return [row for row in alone if row["tokens"] >= FEWEST_TOKENS] or alone


def _of_heads(row: Row) -> int:
    return row["heads"] * row["tokens"]


def show(rows: Sequence[Row]) -> None:
    """Prints the rates and how far they are off, what more query blocks cost, and the table."""
    print(samples_table(rows))
    for head_dim, fields in fit(rows).items():
        rates = SampleRates.read(fields)
        assert rates is not None
        of_dim = [row for row in rows if row["head_dim"] == int(head_dim)]
        print(f"# head_dim {head_dim}: {json.dumps(fields)}")
        off = [
            1000 * rates.seconds(_of_heads(row), row["walks"]) / row["ms"] - 1
            for row in _fitted(of_dim)
        ]
        print(f"#   {min(off):+.1%} to {max(off):+.1%} of what was measured")
        alone = {_size(row): row["ms"] for row in of_dim if row.get("calls", 1) == 1}
        twice = [
            row["ms"] / alone[_size(row)] - 1
            for row in of_dim
            if row.get("calls", 1) == 2 and _size(row) in alone
        ]
        if twice:
            middle = statistics.median(twice)
            print(f"#   twice the query blocks cost {middle:.2f} more, assumed {MORE_BLOCKS}")


def _size(row: Row) -> tuple[int, int, int]:
    return row["tokens"], row["heads"], row["walks"]


def write(rows: Sequence[Row]) -> None:
    """Replaces the rates of measurements of the rows' kind of GPU, whose calls have theirs."""
    show(rows)
    kinds = json.loads(RATES_FILE.read_text(encoding="utf-8"))
    head_dims = kinds[rows[0]["gpu"]]["head_dims"]
    for head_dim, fields in fit(rows).items():
        head_dims[head_dim]["sample"] = fields
    RATES_FILE.write_text(json.dumps(kinds, indent=1) + "\n", encoding="utf-8")
    print(f"# in {RATES_FILE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=90, help="of all")
    parser.add_argument("--tiny", action="store_true", help="without a GPU, to try this script")
    parser.add_argument("--commit", default=commit(), help="where the checkout cannot tell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/new_samples.jsonl")
    parser.add_argument("--fit", type=Path, help="measure nothing: write the rates of these rows")
    options = parser.parse_args()
    if options.fit is not None:
        write(read_rows(options.fit))
        return
    if not options.tiny:
        require_kernels()
    facts = {"gpu": "none" if options.tiny else gpu_name()}
    facts |= {"torch": torch.__version__, "commit": options.commit}
    sizes = shapes(TINY, (2,)) if options.tiny else [*shapes(GRIDS, (24, 40)), *_of_models()]
    device = "cpu" if options.tiny else "cuda"
    measure_all(sizes, device, options.seconds, options.out, facts)
    show(read_rows(options.out))


def _of_models() -> list[Shape]:
    return [SHAPES[name] for name in MODELS]


if __name__ == "__main__":
    main()

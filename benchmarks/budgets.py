# SPDX-License-Identifier: Apache-2.0
"""Cost of token orders, head settings and measuring, in one process.

    python -m benchmarks.budgets [--shapes mochi,cogx2b] [--density .2] [--out FILE]

The rows go to benchmarks/results/h200_budgets.jsonl on an H200, and to new_budgets.jsonl beside it
on other GPUs. No table is made of them.

One JSON object a line. Of calls: shape, case, density (reached), ms (every stage), over_raster (of
ms, against as much density in raster order), gpu, commit. Of measuring: shape, case, blocks, ms
(from the first launch to the end of the last: the host's time where that is longer), dense_ms
(PyTorch's own attention), share_of_dense_call, peak_mib (beyond what stays allocated).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge import AttentionStats, HeadBudget, Router, SparsePolicy, TokenGrid, TokenOrder
from sparge.tune import BLOCKS_A_CALL, Calibration, Workload, measure_for

from .inputs import draw
from .shapes import SHAPES
from .shares import share_of
from .timing import ROOT, commit, gpu_name, in_rounds, median_ms, require_kernels, write_rows

BLOCKS_A_SAMPLE = (BLOCKS_A_CALL, 2 * BLOCKS_A_CALL)
CONTRAST = 1.1  # in all heads: its value has no part in the time


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    policy: SparsePolicy
    order: TokenOrder | None = None
    budget: HeadBudget | None = None

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], **options: Any) -> Tensor:
        return sparge.attention(*qkv, self.policy, order=self.order, budget=self.budget, **options)


def ranked_share(order: TokenOrder, density: float) -> float:
    """Share of all key blocks that a query block ranks in where a call keeps `density` of its
    pairs, as nearly as whole steps can. Text, which is exact, is part of what is kept, as in auto
    budget."""
    kept = Workload(order).density(range(1, order.key_blocks + 1))
    nearest = kept[np.abs(kept - density).argmin()]
    asked = 1 + int(np.flatnonzero(kept == nearest)[-1])  # makes whole steps in raster order, too
    return share_of(asked, order.key_blocks)


def cases(grid: TokenGrid, heads: int, density: float, device: torch.device | str) -> list[Case]:
    """Cases from uniform mass routing in raster order, text exact, to all that calibration may
    choose: densities spread tenfold, half of the heads pooled and ranked by error, a token order
    each. `density` is that of the call, text included."""
    order = sparge.grid_order(grid).on(device)
    density = ranked_share(order, density)
    uniform = torch.full((heads,), density, device=device)
    spread = torch.logspace(-0.5, 0.5, heads, device=device)
    spread = (spread / spread.mean() * density).clamp(max=1)
    every_second = torch.arange(heads, device=device) % 2
    gain, error = every_second.float(), every_second.int() * Router.ERROR
    mass = torch.zeros_like(error)
    walk = (torch.arange(heads, device=device) % order.walks).int()
    policy = SparsePolicy(topk=density)
    raster = SparsePolicy(topk=density, exact_prefix=grid.prefix, exact_suffix=grid.suffix)
    plain = HeadBudget(uniform, torch.zeros_like(gain), mass, pools=False)
    scaled = replace(plain, contrast=torch.full_like(uniform, CONTRAST))
    return [
        Case("raster, uniform", raster),
        Case("cubes, uniform", policy, order, plain),
        Case("cubes, output scale", policy, order, scaled),
        Case("cubes, half pooled", policy, order, HeadBudget(uniform, gain, mass)),
        Case("cubes, half pooled by error", policy, order, HeadBudget(uniform, gain, error)),
        Case("cubes, spread, by error", policy, order, HeadBudget(spread, gain, error)),
        Case("walks, spread, by error", policy, order, HeadBudget(spread, gain, error, walk=walk)),
    ]


def time_cases(name: str, asked: float) -> Iterator[dict[str, Any]]:
    shape = SHAPES[name]
    qkv = draw(shape)
    todo = cases(shape.grid, shape.heads, asked, "cuda")
    density = {case.name: reached(case, qkv) for case in todo}
    ms = in_turns(
        {case.name: partial(case.attend, qkv, out_layout="NHD") for case in todo}, median_ms
    )
    raster = todo[0].name
    for case in density:
        over = ms[case] / ms[raster] * (density[raster] / density[case]) - 1
        yield {
            "shape": name,
            "case": case,
            "density": round(density[case], 4),
            "ms": round(ms[case], 3),
            "over_raster": round(over, 3),
        }


def reached(case: Case, qkv: tuple[Tensor, Tensor, Tensor]) -> float:
    stats = AttentionStats("cuda")
    case.attend(qkv, stats=stats)
    return stats.density


def in_turns(
    works: Mapping[str, Callable[[], object]], ms_of: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """Median of each work over as many rounds as there are works."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _, name in in_rounds(list(works), len(works)):
        found[name].append(ms_of(works[name]))
    return {name: statistics.median(times) for name, times in found.items()}


def time_calibration(name: str) -> Iterator[dict[str, Any]]:
    shape, qkv = SHAPES[name], draw(SHAPES[name])
    dense_ms = median_ms(lambda: scaled_dot_product_attention(*qkv), repeats=5)
    for blocks in BLOCKS_A_SAMPLE:
        calibration = Calibration.begin(
            layers=1,
            heads=shape.heads,
            workload=Workload(sparge.grid_order(shape.grid)),
            blocks_a_call=blocks,
            measure=measure_for("cuda"),
            device="cuda",
        )
        calibration.sample(0, *qkv)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ms = median_ms(partial(calibration.sample, 0, *qkv), with_host=True)
        peak = torch.cuda.max_memory_allocated() - before
        yield {
            "shape": name,
            "case": "calibration sample",
            "blocks": blocks,
            "ms": round(ms, 3),
            "dense_ms": round(dense_ms, 3),
            "share_of_dense_call": round(ms / dense_ms, 3),
            "peak_mib": round(peak / 2**20),
        }


def results(gpu: str) -> Path:
    """File of the rows of a GPU: other results there are of an H200."""
    kind = "h200" if gpu == "NVIDIA H200" else "new"
    return ROOT / "benchmarks" / "results" / f"{kind}_budgets.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", default="mochi,cogx2b", help=", ".join(SHAPES))
    parser.add_argument("--density", type=float, default=0.2)
    parser.add_argument("--commit", default=commit(), help="where the checkout cannot tell")
    parser.add_argument("--out", type=Path, help="see above")
    options = parser.parse_args()
    require_kernels()
    out = options.out or results(gpu_name())
    rows: list[dict[str, Any]] = []
    for name in options.shapes.split(","):
        for row in (*time_cases(name, options.density), *time_calibration(name)):
            rows.append({**row, "gpu": gpu_name(), "commit": options.commit})
            print(json.dumps(rows[-1]), flush=True)
    write_rows(out, rows)


if __name__ == "__main__":
    main()

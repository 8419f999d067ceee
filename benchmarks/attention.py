# SPDX-License-Identifier: Apache-2.0
"""Our attention beside its peers, in one process: time, work, error and memory on real shapes.

    python -m benchmarks.attention [--shapes mochi,cogx2b] [--densities 1,.5] [--seconds 180]
                                   [--out FILE]

One JSON object for each shape, peer or mode of ours, and asked density. Its fields: density
(reached); ms (every stage of a call, in a row of calls that are queued before the GPU comes to
them: without the host's time, which it may wait for in a lone short call); repeats (the median is
of); dense_equivalent_tflops, executed_tflops, rel_l1, rel_l2; extra_mib (peak beyond inputs and
result); gpu, torch, commit. Rows of ours also have pooled_heads (the share that add pseudo-keys)
and drop_rel_l2. A peer that is absent, and a case for which no time was left, has `absent`: why.

Errors are against float32 attention on sampled query blocks. A dense row or a peer is compared over
all keys, a sparse row of ours over the blocks that it kept, so that errors speak of arithmetic.
drop_rel_l2 is the distance to dense attention, which on the synthetic data says little about a
model. Rows with head settings are measured against all keys, too: half of their heads pool what
they drop.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge import AttentionStats, Precision, SparsePolicy
from sparge.kernels import warm

from .cases import Case, half_pooled, spread
from .inputs import draw
from .kept import kept_blocks
from .peers import Absent, Peer, in_a_line, peers, working
from .shapes import SHAPES, Shape
from .speed_rows import OURS, OURS_BUDGETS, OURS_SPREAD, absent_row, errors, row
from .timing import ROOT, Allowance, commit, gpu_name, median_within, require_kernels, write_rows

Qkv = tuple[Tensor, Tensor, Tensor]
#: pvthreshd of the row with the PV filter, which is off in the others.
PV_FILTER = 15.0


def modes(shape: Shape, density: float, device: torch.device | str) -> list[Case]:
    """Modes of ours that are timed.

    Head settings (`budgets`) pool half of the heads' dropped blocks in cube order, or, below
    density 1, spread densities tenfold between heads that take both token orders.
    """
    policy = SparsePolicy(topk=density)
    sizes = (shape.grid, shape.heads, density, device)
    found = [
        Case(OURS, policy),
        Case("ours, PV filter", replace(policy, pvthreshd=PV_FILTER)),
        Case("ours, FP16 V", replace(policy, precision=Precision.INT8_FP16)),
        Case("ours, 16 bits", replace(policy, precision=Precision.SIXTEEN_BIT)),
        half_pooled(OURS_BUDGETS, *sizes),
    ]
    if density < 1:
        found.append(spread(OURS_SPREAD, *sizes))
    return found


def with_extra_memory(work: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Returns the result, and the MiB that the call held at its peak beyond it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = work()
    peak = torch.cuda.max_memory_allocated() - before
    return out, round((peak - out.numel() * out.element_size()) / 2**20)


def time_ours(shape: Shape, qkv: Qkv, case: Case, asked: float, seconds: float) -> dict[str, Any]:
    stats = AttentionStats(qkv[0].device)
    out, extra_mib = with_extra_memory(lambda: case.attend(qkv, stats=stats))
    kept = None if case.order else kept_blocks(*qkv[:2], case.policy)
    l1, l2 = errors(out, *qkv, kept)
    drop = l2 if kept is None else errors(out, *qkv, None)[1]
    del out, kept
    ms, repeats = median_within(lambda: case.attend(qkv, out_layout="NHD"), seconds)
    pooled = (
        float((case.head_settings.pool_weight > 0).float().mean()) if case.head_settings else 0.0
    )
    return row(
        shape,
        case.name,
        asked,
        stats.density,
        ms,
        repeats=repeats,
        rel_l1=l1,
        rel_l2=l2,
        drop_rel_l2=drop,
        extra_mib=extra_mib,
        pooled_heads=pooled,
    )


def time_peer(shape: Shape, qkv: Qkv, peer: Peer, asked: float, seconds: float) -> dict[str, Any]:
    out, extra_mib = with_extra_memory(lambda: peer.run(*qkv))
    l1, l2 = errors(out, *qkv, None)
    del out
    ms, repeats = median_within(lambda: peer.run(*qkv), seconds)
    more = {"repeats": repeats, "rel_l1": l1, "rel_l2": l2, "extra_mib": extra_mib}
    return row(shape, peer.name, asked, asked, ms, **more)


def bench(shape: Shape, densities: list[float], allowance: Allowance) -> Iterator[dict[str, Any]]:
    qkv = draw(shape)
    for asked in densities:
        for case in (*peers(asked, shape.head_dim), *modes(shape, asked, qkv[0].device)):
            seconds = allowance.next()
            if not isinstance(case, Case):
                case = working(case, shape.head_dim)
            if isinstance(case, Absent):
                yield absent_row(shape, case.name, asked, case.reason)
            elif seconds == 0:
                yield absent_row(shape, case.name, asked, "no time was left in this run")
            elif isinstance(case, Case):
                yield time_ours(shape, qkv, case, asked, seconds)
            else:
                try:
                    yield time_peer(shape, qkv, case, asked, seconds)
                except RuntimeError as error:
                    yield absent_row(shape, case.name, asked, in_a_line(error))
    del qkv
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--densities", default="1,.5,.3,.2,.1")
    parser.add_argument("--seconds", type=float, default=180, help="of the whole run, but warm-up")
    parser.add_argument("--commit", default=commit(), help="where the checkout cannot tell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "new.json")
    options = parser.parse_args()
    require_kernels()
    densities = [float(text) for text in options.densities.split(",")]
    shapes = [SHAPES[name] for name in options.shapes.split(",")]
    warm("cuda")
    facts = {"gpu": gpu_name(), "torch": torch.__version__, "commit": options.commit}
    a_shape = sum(len(peers(d, 128)) + len(modes(shapes[0], d, "cpu")) for d in densities)
    allowance = Allowance(options.seconds, len(shapes) * a_shape)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for measured in bench(shape, densities, allowance):
            rows.append(measured | facts)
            print(json.dumps(rows[-1]), flush=True)
        write_rows(options.out, rows)  # after each shape, so that a run cut short leaves something
    print(f"# {len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()

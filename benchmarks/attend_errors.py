# SPDX-License-Identifier: Apache-2.0
"""Errors of Hopper's attend kernel and of the portable one against float32, on the same calls.

    python -m benchmarks.attend_errors [--shapes mochi,cogx2b] [--out FILE]

One JSON object for each shape, kind of data, mode of ours and asked density: wgmma_rel_l1,
wgmma_rel_l2, mma_sync_rel_l1, mma_sync_rel_l2, gpu, torch, commit. Both kernels take INT8 and E4M3
operands, the same ones, and give float32. On this GPU ptxas emulates mma.sync of E4M3 by half
precision with float32 sums, so these are the portable kernel's errors, but not its times.

Data are those that `benchmarks.attention` times, whose values drift along the tokens, and noise, in
which no error averages out. A sparse call is compared over the blocks that it kept; one with head
settings over all keys, as its callers see it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import sparge
from sparge.kernels import Element, capabilities
from sparge.kernels.spec import HOPPER_ENTRIES, AttendPath, attend_path
from sparge.stages import launch

from .attention import modes
from .budgets import Case
from .inputs import draw
from .limits import DENSITIES
from .shapes import SHAPES, Shape
from .speed_rows import OURS, OURS_BUDGETS, errors
from .timing import ROOT, commit, gpu_name, require_kernels, write_rows

SAMPLED_BLOCKS = 6  # of each head: some 2.4 million elements of Mochi

Qkv = tuple[Tensor, Tensor, Tensor]


@contextmanager
def portable_attend() -> Iterator[None]:
    """Context in which calls launch the mma.sync kernel, also where wgmma would serve."""
    path = AttendPath("attend", "mma.sync: asked for by a benchmark")
    with mock.patch.object(launch, "attend_path", lambda *_: path):
        yield


def noise(shape: Shape, device: torch.device | str = "cuda") -> Qkv:
    generator = torch.Generator(device).manual_seed(0)
    size = (3, 1, shape.tokens, shape.heads, shape.head_dim)
    q, k, v = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


DATA = {"drift": draw, "noise": noise}


def measure(shape: Shape, qkv: Qkv, case: Case) -> dict[str, float]:
    plan = None if case.order else sparge.make_plan(*qkv[:2], case.policy)

    def found() -> tuple[float, float]:
        out = case.attend(qkv, output_dtype=torch.float32)
        return errors(out, *qkv, plan, heads=range(shape.heads), blocks=SAMPLED_BLOCKS)

    wgmma = found()
    with portable_attend():
        mma_sync = found()
    names = ("wgmma_rel_l1", "wgmma_rel_l2", "mma_sync_rel_l1", "mma_sync_rel_l2")
    return {name: round(x, 7) for name, x in zip(names, (*wgmma, *mma_sync), strict=True)}


def measure_all(
    shape: Shape, device: torch.device | str = "cuda", densities: Sequence[float] = DENSITIES
) -> Iterator[dict[str, Any]]:
    for data, make in DATA.items():
        qkv = make(shape, device)
        for asked in densities:
            for case in modes(shape, asked, sparge.policy.PV_FILTER_OFF, device):
                if case.name in (OURS, OURS_BUDGETS):
                    named = {"shape": shape.name, "data": data, "mode": case.name}
                    yield named | {"asked_density": asked} | measure(shape, qkv, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", default="mochi,cogx2b")
    parser.add_argument("--commit", default=commit(), help="where the checkout cannot tell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/new_errors.jsonl")
    options = parser.parse_args()
    require_kernels()
    arch = capabilities("cuda").arch
    if attend_path(arch, Element.INT8_E4M3).entry not in HOPPER_ENTRIES:
        raise SystemExit(f"Nothing to compare: kernels for {arch} have no wgmma.")
    facts = {"gpu": gpu_name(), "torch": torch.__version__, "commit": options.commit}
    shapes = (SHAPES[name] for name in options.shapes.split(","))
    rows = [row | facts for shape in shapes for row in measure_all(shape)]
    write_rows(options.out, rows)
    print(f"# {len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()

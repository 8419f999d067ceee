# SPDX-License-Identifier: Apache-2.0
"""Limits of this GPU: what it can do at most, and so what an attention call must take at least.

    python -m benchmarks.limits [--out FILE]

Ceilings are measured (benchmarks/ceilings): products of the tensor cores, our own wgmma kernel's
and PyTorch's, exponentials, conversions, copies in device memory, tiles gathered by a list. The
bound of a call of H heads, N tokens and D channels at a density is

    pairs       = H N^2 (density + pooled / 64)
    tensor      = 2 D pairs / int8_ops + 2 D pairs / e4m3_ops
    exponential = pairs / exp2
    conversion  = pairs / e4m3_conversions
    memory      = max(2 D pairs / 128 / tile_bytes, 4 H N D / copy_bytes)
    preparation = 12 H N D / copy_bytes + 2 D H (N / 128) (N / 64) / bf16_flops
    bound       = max(tensor, exponential, conversion, memory) + preparation

`pooled` is the share of heads with pseudo-keys, one for each 64 keys. tensor: QK, and P times V.
exponential: one a pair, all on the MUFU; conversion: P to E4M3. memory: a K and a V tile from the
L2 for each 128 query rows, and Q read and the result written. preparation: K and V read for their
means; Q, K, V read and K, V written to quantize them; below density 1 one product of block means to
route. The four overlap wholly and everything goes at its rate: no kernel reaches it. One that takes
part of its exponentials elsewhere, as ours does (csrc/attend/hopper/fixed_exp2.cuh), may pass where
`exponential` is the largest, which it is at head_dim 64.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sparge.blocks import KEY_BLOCK, QUERY_BLOCK

from .shapes import SHAPES, Shape

DENSITIES = (1.0, 0.5, 0.3, 0.2, 0.1)
BF16_BYTES, QUANTIZED_BYTES = 2, 1
TENSORS_READ, TENSORS_WRITTEN = 5, 2  # to prepare K and V: K, V for means, then Q, K, V


@dataclass(frozen=True)
class Ceilings:
    """Rates a second: operations (two a multiply-add), elements, or bytes."""

    int8_ops: float
    e4m3_ops: float
    bf16_flops: float
    exp2: float
    e4m3_conversions: float
    tile_bytes: float
    copy_bytes: float


@dataclass(frozen=True)
class Bound:
    """Parts of a bound in milliseconds."""

    tensor: float
    exponential: float
    conversion: float
    memory: float
    preparation: float

    @property
    def total(self) -> float:
        parts = (self.tensor, self.exponential, self.conversion, self.memory)
        return max(parts) + self.preparation


def bound(shape: Shape, density: float, most: Ceilings, pooled_heads: float = 0.0) -> Bound:
    """Bound by the formula above. `density` and `pooled_heads` are shares, 0 to 1."""
    pairs = shape.heads * shape.tokens**2 * (density + pooled_heads / KEY_BLOCK)
    product = 2 * shape.head_dim * pairs
    elements = shape.heads * shape.tokens * shape.head_dim
    routing = 0.0
    if density < 1:
        blocks = (shape.tokens / QUERY_BLOCK) * (shape.tokens / KEY_BLOCK)
        routing = 2 * shape.head_dim * shape.heads * blocks / most.bf16_flops
    prepared = TENSORS_READ * BF16_BYTES + TENSORS_WRITTEN * QUANTIZED_BYTES
    seconds = {
        "tensor": product / most.int8_ops + product / most.e4m3_ops,
        "exponential": pairs / most.exp2,
        "conversion": pairs / most.e4m3_conversions,
        "memory": max(
            product / QUERY_BLOCK / most.tile_bytes, 2 * BF16_BYTES * elements / most.copy_bytes
        ),
        "preparation": prepared * elements / most.copy_bytes + routing,
    }
    return Bound(**{part: 1000 * value for part, value in seconds.items()})


def ceilings(rates: Mapping[str, Mapping[str, float | str]]) -> Ceilings:
    """Largest rate of each kind; a rate that is a text says why it was not measured.

    Raises ValueError for a kind of which nothing was measured.
    """
    best = {}
    for kind in fields(Ceilings):
        numbers = [rate for rate in rates[kind.name].values() if not isinstance(rate, str)]
        if not numbers:
            raise ValueError(f"Nothing was measured of {kind.name}: {rates[kind.name]}")
        best[kind.name] = max(numbers)
    return Ceilings(**best)


def read_ceilings(path: Path) -> Ceilings | None:
    """Ceilings in a file that this script wrote; None where there is no file."""
    if not path.exists():
        return None
    return ceilings(json.loads(path.read_text(encoding="utf-8"))["rates"])


def bounds(most: Ceilings) -> list[dict[str, Any]]:
    """Bounds of every shape and density, milliseconds rounded to a tenth of a microsecond."""
    rows = []
    for shape in SHAPES.values():
        for density in DENSITIES:
            found = bound(shape, density, most)
            parts = {**asdict(found), "total": found.total}
            ms = {part: round(value, 4) for part, value in parts.items()}
            rows.append({"shape": shape.name, "density": density, **ms})
    return rows


def main() -> None:
    from .ceilings import measure
    from .timing import ROOT, commit, gpu_name, require_kernels

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--commit", default=commit(), help="where the checkout cannot tell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/new_limits.json")
    options = parser.parse_args()
    require_kernels()
    if reason := measure.reason_against():
        raise SystemExit(f"Nothing to measure: {reason}")
    rates = measure.rates()
    facts = {"gpu": gpu_name(), "torch": torch.__version__, "commit": options.commit}
    found = {**facts, "rates": rates, "bounds_ms": bounds(ceilings(rates))}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for kind, by_name in rates.items():
        for name, rate in by_name.items():
            print(
                f"{kind:18} {name:36}", rate if isinstance(rate, str) else f"{rate / 1e12:.3f} T/s"
            )
    print(f"# in {options.out}")


if __name__ == "__main__":
    main()

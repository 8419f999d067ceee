# SPDX-License-Identifier: Apache-2.0
"""Numbers that a variant's kernels compute beside the base's, on the GPU suite's shapes and data.

    python -m benchmarks.kernel_numbers CUBINS BASE VARIANT

`kernel_variants` starts it with folders: of cubins, and two of csrc. One JSON object a call: case,
equal, most and repeatable as that module says.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparge
from sparge import AttentionStats, SparsePolicy, cube_order
from tests.gpu.cases import CASES, Case, make_qkv
from tests.gpu.test_budgets import JOBS, budget_of

from .kernel_variants import BASE, Variants

VARIANT = "variant"
POLICIES = {
    "dense": SparsePolicy(topk=1.0),
    "30 %": SparsePolicy(topk=0.3),
    "40 %, filter": SparsePolicy(topk=0.4, pvthreshd=9.0),  # low enough to skip
}
LONGER = ("ragged", "ragged 64", "causal", "causal 64 GQA", "steep softmax")
LONGER_TOKENS = 3001

Tensors = tuple[Tensor, ...]
Work = Callable[[], Tensors]


def calls() -> Iterator[tuple[str, Work]]:
    """Calls by name, each with all that it returns."""
    generator = torch.Generator().manual_seed(0)
    longer = [
        replace(
            case,
            queries=LONGER_TOKENS,
            keys=LONGER_TOKENS,
            reason=f"{case.reason}, {LONGER_TOKENS:,} tokens",
        )
        for case in CASES
        if case.reason in LONGER
    ]
    for case in (*CASES, *longer):
        qkv, options = make_qkv(case, generator), options_of(case)
        for name, policy in POLICIES.items():
            yield f"{case.reason}, {name}", attended(qkv, policy, **options)
        yield f"{case.reason}, partials", partials(qkv, POLICIES["30 %"], **options)
    for job in JOBS:
        qkv = make_qkv(job.case, generator)
        order = None if job.grid is None else cube_order(job.grid)
        options = options_of(job.case) | {"order": order, "budget": budget_of(job.case.heads)}
        yield f"budget: {job.case.reason}", attended(qkv, job.policy, **options)


def options_of(case: Case) -> dict[str, Any]:
    lengths = case.key_lengths
    if lengths is not None:
        lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return {"is_causal": case.causal, "key_lengths": lengths}


def attended(qkv: tuple[Tensor, Tensor, Tensor], policy: SparsePolicy, **options: Any) -> Work:
    def work() -> Tensors:
        stats = AttentionStats("cuda")
        out, lse = sparge.attention(*qkv, policy, return_lse=True, stats=stats, **options)
        return out, lse, stats.counters

    return work


def partials(qkv: tuple[Tensor, Tensor, Tensor], policy: SparsePolicy, **options: Any) -> Work:
    def work() -> Tensors:
        found = sparge.attention_partials(*qkv, policy, **options)
        return tuple(getattr(found, field.name) for field in fields(found))

    return work


def difference(found: Tensors, expected: Tensors) -> tuple[bool, float]:
    """Whether all bits are equal, and the largest difference: inf where one alone is finite."""
    equal, most = True, 0.0
    for one, other in zip(found, expected, strict=True):
        bits = [tensor.flatten().view(torch.uint8) for tensor in (one, other)]
        equal = equal and torch.equal(*bits)
        apart = (one.double() - other.double()).abs()
        apart = apart.where(~apart.isnan(), math.inf)
        apart = apart.where(one.isfinite() | other.isfinite(), 0.0)
        most = max(most, float(apart.max()) if apart.numel() else 0.0)
    return equal, most


def compare(variants: Variants) -> Iterator[dict[str, Any]]:
    """A row for each call that launches the variant."""
    for case, work in calls():
        with variants.using(BASE):
            expected, again = work(), work()
        with variants.using(VARIANT) as asked:
            found = work()
        torch.cuda.synchronize()
        if asked:
            equal, most = difference(found, expected)
            repeatable = difference(again, expected)[0]
            row = {"case": case, "equal": equal, "most": most if math.isfinite(most) else None}
            yield {**row, "repeatable": repeatable}


def main() -> None:
    cubins, base, variant = map(Path, sys.argv[1:])
    for row in compare(Variants({BASE: base, VARIANT: variant}, cubins)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

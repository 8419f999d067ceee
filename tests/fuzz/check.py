# SPDX-License-Identifier: Apache-2.0
"""Runs a drawn call and lists what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import sparge
from sparge import AttentionStats, SparsePolicy, compat, reference
from sparge.blocks import unpack
from sparge.stages import ops
from sparge.stats import Counter
from tests.fuzz.bounds import Bounds, Confidence, bounds, slack
from tests.fuzz.draw import Case
from tests.fuzz.oracle import Exact, Setting, answer
from tests.fuzz.routing import Routing


@dataclass
class Outcome:
    """Outcome of a case: `faults` are sentences; the rest is for whoever judges the bounds."""

    faults: list[str] = field(default_factory=list)
    ratio: float | None = None
    """Square of the error over what is expected on average."""

    def expect(self, holds: object, fault: str) -> None:
        if not holds:
            self.faults.append(fault)


def run(case: Case) -> Outcome:
    outcome = Outcome()
    setting = Setting.of(case)
    {"parts": _parts, "compat": _compat, "ordered": _ordered}.get(case.way, _plain)(
        case, setting, outcome
    )
    return outcome


def _arguments(case: Case, *without: str) -> dict[str, Any]:
    return {name: value for name, value in case.options.items() if name not in without}


def _plain(case: Case, setting: Setting, outcome: Outcome) -> None:
    planned = _arguments(case, "output_dtype", "out_layout", "return_lse")
    plan = sparge.make_plan(case.q, case.k, case.policy, layout=case.layout, **planned)
    kept = plan.kept()
    mask = case.options.get("block_mask")
    Routing(setting).judge(kept, outcome.faults, None if mask is None else mask != 0)
    outcome.expect(torch.equal(plan.counts, kept.sum(-1).int()), "counts of the plan")
    given = _arguments(case)
    if case.way == "plan":
        given = {**_arguments(case, "is_causal", "key_lengths"), "plan": plan}
    stats = AttentionStats(case.q.device)
    out, lse = _call(case, **given, stats=stats)
    exact = answer(setting, kept, slack(setting))
    _judge(case, setting, exact, out, lse, outcome)
    _count(case, setting, kept, exact, stats, outcome)


def _ordered(case: Case, setting: Setting, outcome: Outcome) -> None:
    stats = AttentionStats(case.q.device)
    with routed() as maps:
        out, lse = _call(case, **case.options, stats=stats)
    kept = torch.cat(maps, 1)[..., : setting.key_blocks]
    Routing(setting).judge(kept, outcome.faults, None)
    exact = answer(setting, kept, slack(setting))
    _judge(case, setting, exact, out, lse, outcome)
    _count(case, setting, kept, exact, stats, outcome)


def _compat(case: Case, setting: Setting, outcome: Outcome) -> None:
    """Upstream's functions, by the policy that they stand for."""
    policy, options = case.policy, case.options
    named: dict[str, Any] = {
        "scale": options.get("scale"),
        "smooth_k": policy.smooth_k,
        "pvthreshd": policy.pvthreshd,
        "attention_sink": policy.attention_sink,
        "tensor_layout": case.layout,
        "output_dtype": options["output_dtype"],
        "return_sparsity": options["return_sparsity"],
    }
    base = SparsePolicy(
        smooth_k=policy.smooth_k,
        pvthreshd=policy.pvthreshd,
        attention_sink=policy.attention_sink,
        keep_diagonal=False,
    )
    tensors, mask = (case.q, case.k, case.v), case.options.get("block_mask")
    if options["function"] == "mask":
        assert mask is not None
        before = mask.clone()
        result = compat.block_sparse_sage2_attn_cuda(*tensors, mask_id=mask, **named)
        outcome.expect(torch.equal(mask, before), "mask_id was written to")
        mask = mask != 0
        mask[..., 0] |= policy.attention_sink
        is_causal = False
    else:
        is_causal = options["is_causal"]
        named |= {"is_causal": is_causal, "simthreshd1": policy.simthreshd1}
        by_mass = options["function"] == "cdf"
        base = replace(base, select_by=options["function"], simthreshd1=policy.simthreshd1)
        if by_mass:
            base = replace(base, cdfthreshd=policy.cdfthreshd)
            function, own = compat.spas_sage2_attn_meansim_cuda, "cdfthreshd"
        else:
            base = replace(base, topk=policy.topk)
            function, own = compat.spas_sage2_attn_meansim_topk_cuda, "topk"
        result = function(*tensors, **named | {own: getattr(policy, own)})
    plain = {"is_causal": is_causal, "scale": options.get("scale")}
    meant = replace(case, policy=base, options=plain | {"output_dtype": options["output_dtype"]})
    setting = Setting.of(meant)
    plan = sparge.make_plan(case.q, case.k, base, layout=case.layout, block_mask=mask, **plain)
    kept = plan.kept()
    Routing(setting).judge(kept, outcome.faults, mask)
    out, sparsity = result if isinstance(result, tuple) else (result, None)
    exact = answer(setting, kept, slack(setting))
    _judge(meant, setting, exact, _first(out, case.layout), None, outcome)
    if sparsity is not None:
        valid, taken = _pairs(setting, kept)
        share = 1 - taken / valid if valid else 0.0
        outcome.expect(abs(sparsity - share) < 1e-9, f"sparsity {sparsity}, not {share}")


def _parts(case: Case, setting: Setting, outcome: Outcome) -> None:
    """Two halves of the blocks that a mask keeps, put together by their maxima and sums."""
    mask = case.options["block_mask"] != 0
    given = _arguments(case, "output_dtype", "block_mask")
    half = torch.arange(mask.shape[-1], device=mask.device) % 2 == case.seed // 2 % 2
    sums = [
        sparge.attention_partials(
            case.q, case.k, case.v, case.policy, layout=case.layout, **given, block_mask=part
        )
        for part in (mask & half, mask & ~half)
    ]
    top = torch.maximum(sums[0].row_max, sums[1].row_max)
    top = top.masked_fill(top == -math.inf, 0).double()
    weights = [(part.row_max.double() - top).exp2() for part in sums]
    row_sum = sum(part.row_sum * w for part, w in zip(sums, weights, strict=True))
    out = sum(part.out_sum * w.unsqueeze(-1) for part, w in zip(sums, weights, strict=True))
    assert isinstance(out, Tensor) and isinstance(row_sum, Tensor)
    out = torch.where(row_sum.unsqueeze(-1) > 0, out / row_sum.unsqueeze(-1), 0.0)
    policy = replace(case.policy, pvthreshd=50.0)
    if case.policy.pv_filter:  # each part has maxima of its own
        return
    meant = replace(case, policy=policy, options=case.options | {"output_dtype": torch.float32})
    setting = Setting.of(meant)
    exact = answer(setting, mask & Routing(setting).exists())
    _judge(meant, setting, exact, out, None, outcome)


def _call(case: Case, **given: Any) -> tuple[Tensor, Tensor | None]:
    """The result as (B, H, Nq, D), and the log-sum-exp."""
    attention: Any = sparge.attention
    result = attention(case.q, case.k, case.v, case.policy, layout=case.layout, **given)
    out, lse = result if given.get("return_lse") else (result, None)
    return _first(out, given.get("out_layout") or case.layout), lse


def _first(out: Tensor, layout: str) -> Tensor:
    return out if layout == "HND" else out.transpose(1, 2)


@contextmanager
def routed() -> Iterator[list[Tensor]]:
    """The maps (B, H, nq, nk) bool of the calls inside, or of the groups of heads they are cut in.
    An order or a budget is not for `make_plan`, so they are caught where they are made."""
    maps: list[Tensor] = []
    route, attention = ops.route, reference.attention

    def on_gpu(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        block_map, counts = route(*args, **named)
        maps.append(unpack(block_map, block_map.shape[-1] * 32))
        return block_map, counts

    def on_cpu(*args: Any, **named: Any) -> Any:
        attended, routed = attention(*args, **named)
        maps.append(routed.kept)
        return attended, routed

    with (
        mock.patch.object(ops, "route", on_gpu),
        mock.patch.object(reference, "attention", on_cpu),
    ):
        yield maps


def _pairs(setting: Setting, kept: Tensor) -> tuple[int, int]:
    """Numbers of pairs of a query and a key: all, and those of kept blocks."""
    return int(setting.pairs(torch.ones_like(kept)).sum()), int(setting.pairs(kept).sum())


def _count(
    case: Case,
    setting: Setting,
    kept: Tensor,
    exact: Exact,
    stats: AttentionStats,
    outcome: Outcome,
) -> None:
    valid, taken = _pairs(setting, kept)
    counted = stats.counters.tolist()
    outcome.expect(stats.calls == 1, f"stats.calls is {stats.calls}")
    outcome.expect(counted[Counter.VALID] == valid, f"{counted[Counter.VALID]} pairs, not {valid}")
    outcome.expect(counted[Counter.KEPT] == taken, f"{counted[Counter.KEPT]} kept, not {taken}")
    blocks = int(kept.sum())
    outcome.expect(counted[Counter.KEPT_BLOCKS] == blocks, f"kept blocks, not {blocks}")
    least, most = exact.skipped
    skipped = counted[Counter.PV_SKIPPED]
    outcome.expect(least <= skipped <= most, f"{skipped} pairs skipped, not {least} to {most}")


def _judge(
    case: Case, setting: Setting, exact: Exact, out: Tensor, lse: Tensor | None, outcome: Outcome
) -> None:
    dtype = case.options.get("output_dtype") or case.q.dtype
    outcome.expect(out.dtype in (dtype, torch.float64), f"dtype {out.dtype}, not {dtype}")
    outcome.expect(out.shape == setting.q.shape, f"shape {tuple(out.shape)}")
    bound = bounds(setting, exact, dtype)
    empty = ~exact.seen
    outcome.expect(not out[empty].any(), "a row without keys is not 0")
    error = (out.double() - exact.out).square().sum(-1)
    _compare(error.sqrt(), bound.out, "out", exact, outcome)
    if lse is not None:
        outcome.expect((lse[empty] == -math.inf).all(), "LSE of a row without keys is not -inf")
        off = (lse.double() - exact.lse)[exact.seen].abs()
        limit = bound.lse[exact.seen]
        if not (off <= limit).all():
            worst = (off / limit).nan_to_num(math.inf).argmax()
            outcome.faults.append(f"LSE is off by {off[worst]:.3g}, bound {limit[worst]:.3g}")
    _spread(case, setting, error, bound, outcome)


def _compare(error: Tensor, limit: Tensor, name: str, exact: Exact, outcome: Outcome) -> None:
    wrong = ~(error <= limit)
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        b, h, i = where
        outcome.faults.append(
            f"{name} of {int(wrong.sum())} of {wrong.numel()} rows, first {where}: off by "
            f"{error[b, h, i]:.4g}, bound {limit[b, h, i]:.4g}, of {exact.out[b, h, i].norm():.4g}"
        )


def _spread(case: Case, setting: Setting, error: Tensor, bound: Bounds, outcome: Outcome) -> None:
    """All errors together are near what is expected: far sharper than any row."""
    known = bound.expected.isfinite() & (bound.expected > 0)
    if not known.any():
        return
    expected, found = bound.expected[known], error[known]
    total = expected.sum()
    outcome.ratio = float(found.sum() / total)
    # As many independent parts as rows, but rows share the errors of keys and values.
    shared = 1
    for name in "qkv":
        x = case.heads_first(name)
        shared *= math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step == 0)
    sources = setting.q.shape[0] * case.heads_first("k").shape[1] * setting.q.shape[-1]
    parts = min(float(total.square() / expected.square().sum()), sources) / shared
    x = Confidence(1).x
    limit = 1 + 2 * math.sqrt(x / parts) + 2 * x / parts
    outcome.expect(
        outcome.ratio <= limit,
        f"mean square error {outcome.ratio:.3g} times the expected one, bound {limit:.3g}",
    )

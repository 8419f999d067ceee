# SPDX-License-Identifier: Apache-2.0
"""Runs a drawn call and lists what is wrong with it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import sparge
from benchmarks.kept import routed
from sparge import AttentionStats, Precision
from sparge.stats import Counter
from tests.fuzz.bounds import Bounds, Confidence, bounds, slack
from tests.fuzz.draw import Case
from tests.fuzz.oracle import Exact, Setting, answer
from tests.fuzz.routing import Routing

#: Share of the calls that are made again with a number that is none.
SPOILT = 0.3


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
    outcome, setting = Outcome(), Setting.of(case)
    given, stats = dict(case.options), AttentionStats(case.q.device)
    mask = given.get("block_mask")
    with routed() as maps:
        out, lse = _call(case, **given, stats=stats)
    kept = torch.cat(maps, 1)[..., : setting.key_blocks]
    Routing(setting).judge(kept, outcome.faults, None if mask is None else mask != 0)
    exact = answer(setting, kept, slack(setting))
    _judge(case, setting, exact, out, lse, outcome)
    _count(setting, kept, exact, stats, outcome)
    _spoil(case, given, setting, exact, out, outcome)
    return outcome


def _spoil(
    case: Case, given: dict[str, Any], setting: Setting, exact: Exact, out: Tensor, outcome: Outcome
) -> None:
    """A number that is none, in a key or a value: no row of the query heads that read it is one,
    whether their blocks are kept or not, and nothing of the others changes (on a GPU by a bit). One
    in a query: its row, and maybe others of its head. A row without keys stays 0, but with 8 bits a
    causal one may keep a block that it sees no key of."""
    rng = random.Random(case.seed)
    if rng.random() > SPOILT:
        return
    name, bad = rng.choice("qkv"), rng.choice((math.nan, math.inf, -math.inf))
    tensors = {each: case.heads_first(each).clone() for each in "qkv"}
    batch, heads, tokens, channels = tensors[name].shape
    entry, head, channel = (rng.randrange(n) for n in (batch, heads, channels))
    if name != "q":
        tokens = int(setting.valid[entry].sum())
    if tokens == 0:
        return
    token = rng.randrange(tokens)
    tensors[name][entry, head, token, channel] = bad
    turned = {each: x if case.layout == "HND" else x.transpose(1, 2) for each, x in tensors.items()}
    hurt, lse = _call(replace(case, **turned), **given)
    group = out.shape[1] // heads
    own = (entry, slice(head * group, (head + 1) * group), token if name == "q" else slice(None))
    spoilt = torch.zeros_like(exact.seen)
    spoilt[own] = exact.seen[own]
    others = torch.ones_like(exact.seen)
    others[own[:2]] = False
    what = f"{bad} in {name}{(entry, head, token, channel)}"
    outcome.expect(not hurt.isfinite().all(-1)[spoilt].any(), f"{what} does not show")
    outcome.expect(lse is None or lse[spoilt].isnan().all(), f"{what} does not show in the LSE")
    outcome.expect(hurt[exact.seen & ~spoilt].isfinite().all(), f"{what} shows elsewhere")
    if case.policy.precision is Precision.SIXTEEN_BIT or not case.is_causal:
        outcome.expect(not hurt[~exact.seen].any(), f"{what} shows in a row without keys")
        of_none = None if lse is None else lse[~exact.seen] == -math.inf
        outcome.expect(of_none is None or of_none.all(), f"{what} shows in its LSE")
    same = torch.equal(hurt[others], out[others])
    if out.device.type == "cpu":  # the reference sums what goes together in another order
        near = 1e-5 * float(out[others].abs().max()) if others.any() else 0.0
        same = torch.allclose(hurt[others], out[others], rtol=2.0**-7, atol=near)
    outcome.expect(same, f"{what} changes other heads")


def _call(case: Case, **given: Any) -> tuple[Tensor, Tensor | None]:
    """The result as (B, H, Nq, D), and the log-sum-exp."""
    attention: Any = sparge.attention
    result = attention(case.q, case.k, case.v, case.policy, layout=case.layout, **given)
    out, lse = result if given.get("return_lse") else (result, None)
    heads_first = (given.get("out_layout") or case.layout) == "HND"
    return out if heads_first else out.transpose(1, 2), lse


def _count(
    setting: Setting, kept: Tensor, exact: Exact, stats: AttentionStats, outcome: Outcome
) -> None:
    counted = stats.counters.tolist()
    for name, found, wanted in (
        ("calls", stats.sparse_calls, 1),
        ("pairs", counted[Counter.VALID], int(setting.pairs(torch.ones_like(kept)).sum())),
        ("kept pairs", counted[Counter.KEPT], int(setting.pairs(kept).sum())),
        ("kept blocks", counted[Counter.KEPT_BLOCKS], int(kept.sum())),
    ):
        outcome.expect(found == wanted, f"{found} {name}, not {wanted}")
    (least, most), skipped = exact.skipped, counted[Counter.PV_SKIPPED]
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
    _compare("out", error.sqrt(), bound.out, outcome)
    if lse is not None:
        outcome.expect((lse[empty] == -math.inf).all(), "LSE of a row without keys is not -inf")
        off = (lse.double() - exact.lse).masked_fill(empty, 0).abs()
        _compare("LSE", off, bound.lse.masked_fill(empty, 0), outcome)
    _spread(case, setting, error, bound, outcome)


def _compare(name: str, error: Tensor, limit: Tensor, outcome: Outcome) -> None:
    wrong = ~(error <= limit)
    if wrong.any():
        b, h, i = where = wrong.nonzero()[0].tolist()
        outcome.faults.append(
            f"{name} of {int(wrong.sum())} of {wrong.numel()} rows, first {where}: off by "
            f"{error[b, h, i]:.4g}, bound {limit[b, h, i]:.4g}"
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

# SPDX-License-Identifier: Apache-2.0
"""Measuring: what every candidate would make of a few query blocks, beside exact attention.

A candidate is token order x pool weight x density. Errors are measured at a few densities and read
off between them, at many.

With weights p of the kept keys, P of the mean keys of dropped blocks, and a pool weight g, a row is

    y = (sum p v + g sum P V) / (sum p + g sum P)

in place of o, where nothing is dropped. An output scale c turns y into c y + (1 - c) m, with m the
mean value of all keys, so that sums of |y - o|^2, <y - o, m - o> and |m - o|^2 over rows say what
any output scale leaves. On a GPU the library's own kernels measure (`measure_kernels`); here is the
same in plain torch, for a CPU. Neither waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..blocks import KEY_BLOCK, QUERY_BLOCK, whole_steps
from ..kernels import capabilities
from ..kernels.spec import eight_bit_element
from ..order.grid import EMPTY, TokenOrder
from ..policy import Precision
from ..reference import Operands, log_scores
from ..stages.as_written import as_written

#: Densities whose errors are measured. The last keeps all, so that every target can be met.
MEASURED = (0.03, 0.075, 0.15, 0.25, 0.4, 0.6, 1.0)
#: Weights of the mean key that stands for a dropped block; 0 is plain dropping. 0.25 and 0.5 are
#: for heads that full pooling ruins, 1.2 for those whose logits vary inside a block.
POOL_WEIGHTS = (0.0, 0.25, 0.5, 0.85, 1.0, 1.2)
#: Ratio of a density that a head may get to the one before: steps of 0.002 at 3 %, 0.015 at 20 %.
RATIO = 1.08
#: Share of dense attention that pooled keys cost a head: one for 64 keys.
POOLED_COST = 1 / KEY_BLOCK
LEAST_ERROR = 1e-6  # keeps the logarithm of an error of 0 a number, far below the 8-bit error


#: One in so many rows of a query block is compared (docs/experiments.md, Rows of a query block).
ROW_STEP = 4
GOLDEN = (5**0.5 - 1) / 2  # any number of its multiples in a row, modulo 1, is evenly spread
BYTES_AT_ONCE = 500_000_000  # of the weights of measured rows, on a CPU


@dataclass(frozen=True, eq=False)
class Candidates:
    """Candidates of the heads that attend in one token order or one of several. Tensors are on one
    device, float64 unless they say otherwise."""

    orders: int
    """Number of token orders that a head may take."""
    asked: Tensor
    """(densities,) float32, ascending: densities as `HeadSettings` takes them."""
    kept: Tensor
    """(densities,): shares of query-key pairs that they keep, forced blocks included."""
    below: Tensor
    """(densities,) int64: the measured density below each of them."""
    share: Tensor
    """(densities,): place between that one, 0, and the next measured one, 1."""
    measured: tuple[float, ...]
    """Measured densities, as a `threshold_table` takes them; the last is 1."""
    scaled: bool
    """Whether heads may have an output scale: 16-bit operands do not know it."""

    @classmethod
    def of(
        cls,
        order: TokenOrder,
        device: torch.device,
        shares_keys: bool = False,
        precision: Precision = Precision.INT8,
    ) -> Candidates:
        """Candidates of calls in these token orders. shares_keys: several heads read the same keys
        (GQA), which have to share an order, so that the first alone is offered. precision: of the
        calls."""
        blocks = order.key_blocks
        between, density = [MEASURED[0]], MEASURED[0]
        while (density := density * RATIO) < 1:
            between.append(density)
        ranks, fine = _ranks(MEASURED, blocks), _ranks([*between, 1.0], blocks)
        rank_of = dict(zip(kept_shares(order, fine), fine, strict=True))
        known = torch.tensor(kept_shares(order, ranks), dtype=torch.float64, device="cpu")
        kept = torch.tensor(sorted(rank_of), dtype=torch.float64, device="cpu")
        below = (torch.searchsorted(known, kept, right=True) - 1).clamp(max=len(known) - 2)
        gap = known[below + 1] - known[below]
        share = torch.where(gap > 0, (kept - known[below]) / gap.where(gap > 0, 1.0), 1.0)
        asked = [_asking(rank_of[each], blocks) for each in sorted(rank_of)]
        return cls(
            1 if shares_keys else order.order_kinds,
            torch.tensor(asked, dtype=torch.float32, device="cpu").to(device),
            kept.to(device),
            below.to(device),
            share.to(device),
            tuple(_asking(rank, blocks) for rank in ranks),
            _takes_scales(precision, device),
        )

    @property
    def least(self) -> float:
        """Share of pairs that is kept whatever is chosen. Waits for the device."""
        return float(self.kept[0])

    def costs(self) -> Tensor:
        """(2, densities): shares of dense attention that heads take, not pooling and pooling."""
        return torch.stack([self.kept, self.kept + POOLED_COST * (self.kept < 1)])

    def errors_between(self, measured: Tensor) -> Tensor:
        """(..., densities) errors from those of the measured densities. They fall about
        exponentially, so that their logarithm is read linearly; in the last stretch, which ends at
        0, the error itself."""
        low, high = measured[..., self.below], measured[..., self.below + 1]
        log_low, log_high = (x.clamp(min=LEAST_ERROR).log() for x in (low, high))
        curve = _line(log_low, log_high, self.share).exp()
        is_last = self.below == measured.shape[-1] - 2
        found = torch.where(is_last, _line(low, high, self.share), curve)
        return torch.where(self.kept < 1, found, 0.0)

    def between(self, measured: Tensor) -> Tensor:
        """(..., densities) values read linearly from those of the measured densities."""
        return _line(measured[..., self.below], measured[..., self.below + 1], self.share)


def _takes_scales(precision: Precision, device: torch.device) -> bool:
    if precision is not Precision.INT8:
        return precision is Precision.INT8_FP16
    arch = capabilities(device).arch
    return not arch or eight_bit_element(arch).quantized


def _line(low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    return low + share * (high - low)


def _ranks(densities: Sequence[float], blocks: int) -> list[int]:
    """Ranked blocks that each density asks for, at least one."""
    return [max(1, int(density * blocks + 1e-9)) for density in densities]


def _asking(rank: int, blocks: int) -> float:
    """Density that asks for so many ranked blocks: half a block more, for rounding to float32."""
    return min(1.0, (rank + 0.5) / blocks)


def kept_shares(order: TokenOrder, ranks: Sequence[int]) -> list[float]:
    """Share of query-key pairs that is kept where each query block asks for so many ranked blocks,
    filled up to `whole_steps`, for each of `ranks`. Ranked blocks of several sizes count as their
    mean."""
    # Vectors alone: of a matrix each sum would wake a thread of every core.
    queries, keys = order.query_counts().cpu().double(), order.block_counts.cpu().double()
    of_queries, of_keys = ~order.queries_exact.cpu(), ~order.keys_exact.cpu()
    blocks = of_queries * of_keys.sum()  # ranked ones of each query block
    forced, of_ranked = len(keys) - blocks, queries * of_queries * (keys * of_keys).sum()
    pairs, mean = queries.sum() * keys.sum(), of_ranked / blocks.clamp(min=1)
    always = pairs - of_ranked.sum()
    taken = [whole_steps(torch.full_like(blocks, rank), forced).minimum(blocks) for rank in ranks]
    return [float((always + (mean * each).sum()) / pairs) for each in taken]


@dataclass(frozen=True, eq=False)
class MeasuredCall:
    """Query blocks of one call that are measured: q (B, H, N, D) over k, v (B, Hkv, N, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    order: TokenOrder
    """Token orders of the call, on its device."""
    candidates: Candidates
    query_blocks: Sequence[int]

    @property
    def tokens(self) -> Tensor:
        """(S, rows) int64: tokens that are compared in the first token order, `EMPTY` where a slot
        holds none. Selected block by block: an index tensor would come from the host and wait."""
        return compared_rows(tokens_of_blocks(self.order, self.query_blocks)[0]).long()


@dataclass(frozen=True, eq=False)
class Measured:
    """Sums over the compared rows of one call, float64: (heads, orders, pool weights, measured
    densities), and (heads, orders) of what all candidates share."""

    error: Tensor
    """|y - o|^2"""
    towards: Tensor
    """<y - o, m - o>"""
    far: Tensor
    """|m - o|^2"""
    norm: Tensor
    """|o|^2"""
    truth: Tensor | None = None
    """(B, H, S, rows, D): o of `MeasuredCall.tokens`."""


class Sums:
    """Sums of the layers that were measured, as in `Measured`."""

    def __init__(self) -> None:
        self.of_layers: dict[int, tuple[Tensor, ...]] = {}
        self.blocks: dict[int, int] = {}
        """Query blocks measured of each layer."""

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def add(self, layer: int, measured: Measured, blocks: int) -> None:
        new = measured.error, measured.towards, measured.far, measured.norm
        if layer in self.of_layers:
            new = tuple(map(torch.add, self.of_layers[layer], new))
        self.of_layers[layer] = new
        self.blocks[layer] = self.blocks.get(layer, 0) + blocks

    def or_else(self, earlier: Sums) -> Sums:
        """These, with earlier ones of the layers where nothing was measured, or nothing finite."""
        both = Sums()
        both.of_layers = {**earlier.of_layers}
        both.blocks = {**earlier.blocks, **self.blocks}
        for layer, mine in self.of_layers.items():
            others = earlier.of_layers.get(layer)
            if others is not None:
                finite = torch.stack([x.isfinite().all() for x in mine]).all()
                mine = tuple(a.where(finite, b) for a, b in zip(mine, others, strict=True))
            both.of_layers[layer] = mine
        return both


def measure(call: MeasuredCall, with_truth: bool = False) -> Measured:
    """Measures the query blocks of a call. Never waits for the device.

    Raises sparge.Unsupported, torch.OutOfMemoryError.
    """
    with as_written(call.q.device):
        if capabilities(call.q.device).usable:
            from .measure_kernels import on_kernels

            return on_kernels(call, with_truth)
        return _on_reference(call, with_truth)


def spread_places(count: int, first: int, wanted: int) -> list[int]:
    """Numbers `first`, `first` + 1 ... of an endless visit of 0 .. count - 1: as many as `wanted`,
    none twice.

    Steps of about the golden ratio of `count` spread the places of any few visits evenly. A step
    coprime to `count` comes to none twice before it came to all.
    """
    step = next(step for step in range(round(count * GOLDEN), 2 * count) if gcd(step, count) == 1)
    return [place * step % count for place in range(first, first + min(wanted, count))]


def compared_rows(values: Tensor, dim: int = -1) -> Tensor:
    """Compared ones of the 128 rows of a query block along `dim`.

    One row of every four. Which of the four it is changes from one four to the next, and again from
    one sixteen to the next. Cubes are about 4 x 4 x 4 tokens. The same rows of each would be some
    of their columns or one of their diagonals, where heads that look to one side do not err.
    """
    firsts = range(0, QUERY_BLOCK, ROW_STEP)
    rows = [first + (first // 4 + first // 16) % ROW_STEP for first in firsts]
    on_device = torch.tensor(rows, device="cpu").to(values.device, non_blocking=True)
    return values.index_select(dim, on_device)


def tokens_of_blocks(order: TokenOrder, blocks: Sequence[int]) -> Tensor:
    """(orders, S, 128) int32 tokens of query blocks, `EMPTY` in slots that hold none."""
    slots = pad(order.slot_tokens, (0, -order.slots % QUERY_BLOCK), value=EMPTY)
    by_block = slots.unflatten(1, (-1, QUERY_BLOCK))
    return torch.stack([by_block[:, block] for block in blocks], 1)


def _on_reference(call: MeasuredCall, with_truth: bool) -> Measured:
    """`measure` in plain torch, float32, as many heads at once as there is room for."""
    group, kv_heads = call.q.shape[1] // call.k.shape[1], call.k.shape[1]
    rows = len(call.query_blocks) * QUERY_BLOCK // ROW_STEP
    at_once = max(1, BYTES_AT_ONCE // (16 * rows * call.order.slots * group))
    of_orders: list[list[Tensor]] = []
    truth: Tensor | None = None
    for kind in range(call.candidates.orders):
        order, of_entries = call.order.of_kind(kind), []
        for entry in range(call.q.shape[0]):
            of_groups = []
            for first in range(0, kv_heads, at_once):
                last = min(kv_heads, first + at_once)
                q = call.q[entry, first * group : last * group]
                k, v = (x[entry, first:last].repeat_interleave(group, 0) for x in (call.k, call.v))
                of_groups.append(_of_heads(q, k, v, order, call))
            of_entries.append([torch.cat(parts) for parts in zip(*of_groups, strict=True)])
        *sums, outs = (torch.stack(parts) for parts in zip(*of_entries, strict=True))
        of_orders.append([x.sum(0) for x in sums])
        truth = outs if truth is None and with_truth else truth
    error, towards, far, norm = (torch.stack(x, 1) for x in zip(*of_orders, strict=True))
    return Measured(error, towards, far, norm, truth)


def _of_heads(
    q: Tensor, k: Tensor, v: Tensor, order: TokenOrder, call: MeasuredCall
) -> tuple[Tensor, ...]:
    """error and towards (H, pool weights, densities), far and norm (H,), and truth (H, S, rows, D)
    of heads q, k, v (H, N, D) in one token order."""
    x = Operands.of(q[None], k[None], v[None], order)
    blocks, scale = list(call.query_blocks), call.scale
    x = replace(x, q=x.q[:, :, blocks], query_counts=x.query_counts[blocks])
    kept = _kept(x, order, call.candidates, scale)  # of each density (H, S, key blocks)
    rows, k, v, mean_value = x.q[0], x.k[0].flatten(1, 2), x.v[0].flatten(1, 2), x.vbar[0, :, None]
    holds, real = order.slot_token != EMPTY, x.occupied[blocks]

    rows, real = compared_rows(rows, 2) * scale, compared_rows(real)[..., None]
    logits = (rows.flatten(1, 2) @ k.mT).view(*rows.shape[:3], -1)  # (H, S, R, slots)
    logits = logits.masked_fill_(~holds, -torch.inf)
    pooled = rows @ x.k_block_mean[0].mT.unsqueeze(1) + order.block_counts.float().log()
    top = torch.maximum(logits.amax(-1), pooled.amax(-1)).unsqueeze(-1)
    exact, pooled = (logits - top).exp_().unflatten(-1, (-1, KEY_BLOCK)), (pooled - top).exp_()
    means = x.v_block_mean[0].unsqueeze(1)
    sums = exact.sum(-1)  # of each key block: (H, S, R, key blocks), and of values (..., D)
    of_block = exact.permute(0, 3, 1, 2, 4).flatten(2, 3) @ v.unflatten(1, (-1, KEY_BLOCK))
    outs = of_block.unflatten(2, rows.shape[1:3]).transpose(1, 2).flatten(-2).contiguous()
    o = outs.sum(2).view(*rows.shape) / sums.sum(-1, keepdim=True)
    error, towards = [], []
    for of_density in kept:
        exactly, rest = of_density[:, :, None].float(), pooled * ~of_density[:, :, None]
        y = (exactly @ outs).view(o.shape)
        a = (sums * exactly).sum(-1, keepdim=True)
        pool, r = rest @ means, rest.sum(-1, keepdim=True)
        for weight in POOL_WEIGHTS:
            off = (y + weight * pool) / (a + weight * r).clamp(min=1e-30) - o
            error.append(_sum(off.square() * real))
            towards.append(_sum(-off * o * real))  # the mean value is 0 here
    far, norm = (_sum((o + x).square() * real) for x in (0, mean_value.unsqueeze(1)))
    of_candidates = (torch.stack(x, -1).unflatten(-1, (len(kept), -1)).mT for x in (error, towards))
    return (*of_candidates, far, norm, o + mean_value.unsqueeze(1))


def _sum(of_rows: Tensor) -> Tensor:
    return of_rows.sum((1, 2, 3), dtype=torch.float64)


def _kept(x: Operands, order: TokenOrder, candidates: Candidates, scale: float) -> list[Tensor]:
    """(H, S, key blocks) bool for each measured density: blocks that it keeps, those first whose
    pooling would err most."""
    valid = order.keys_exact.new_ones(1, *x.q_block_mean.shape[1:3], order.key_blocks)
    score = log_scores(x, scale, valid)[1][0].masked_fill(order.keys_exact, torch.inf)
    place = score.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    forced = order.keys_exact.sum()
    asked = [max(1, int(density * order.key_blocks)) for density in candidates.measured]
    return [place < forced + whole_steps(torch.full_like(forced, rank), forced) for rank in asked]

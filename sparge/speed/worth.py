# SPDX-License-Identifier: Apache-2.0
"""Estimate whether a sparse call is faster than a dense one, from sizes alone; nothing is timed.

With H heads of all batch entries, N tokens, and a share of the pairs that is kept:

    kept   = H N^2 share
    sparse = launch + token H N + (pair [+ filter_pair]) kept
             [+ pool_token H N + pair pooled H N^2 / 64]
    dense  = launch + pair H N^2

filter_pair: with the PV filter; the last line: with head settings of which a share of the heads,
pooled, adds pseudo-keys. Routing does not show beside the rest. A call that the host takes longer
to launch takes as long as the host. The rates are in rates.json, which `python -m
benchmarks.rates calls --fit` writes from measurements; where nothing was measured (another kind of
GPU, another head_dim) there is no opinion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..blocks import KEY_BLOCK
from .measuring_cost import MeasuringRates

RATES_FILE = Path(__file__).with_name("rates.json")

#: GPU whose proportions stand for those of kinds that were not measured.
STAND_IN = "NVIDIA H200"

#: PyTorch's kernels of which there are rates.
TORCH_KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Call:
    """Facts that the time of an attention call depends on, beside the share that it keeps."""

    tokens: int
    heads: int
    """Heads of all batch entries together."""
    head_dim: int
    pv_filter: bool = False
    pooled: float | None = None
    """Share of the heads that add pseudo-keys, in a call with head settings; None without."""

    @property
    def rows(self) -> int:
        return self.heads * self.tokens

    @property
    def pairs(self) -> int:
        return self.rows * self.tokens

    def sparse_terms(self, density: float) -> dict[str, float]:
        """Factor of each rate of `SparseRates`."""
        with_settings = self.pooled is not None
        kept = density * self.pairs
        return {
            "launch": 1.0,
            "token": self.rows,
            "pair": kept + (self.pooled or 0.0) * self.pairs / KEY_BLOCK,
            "filter_pair": kept * self.pv_filter,
            "pool_token": self.rows * with_settings,
        }

    def dense_terms(self) -> dict[str, float]:
        """Factor of each rate of `DenseRates`."""
        return {"launch": 1.0, "pair": self.pairs}


@dataclass(frozen=True)
class SparseRates:
    """Rates of sparse calls in seconds: each is a part of the formula above."""

    host: float
    host_budgets: float
    """Seconds of the host in a call with head settings."""
    launch: float
    token: float
    pair: float
    filter_pair: float
    pool_token: float

    def host_of(self, call: Call) -> float:
        return self.host if call.pooled is None else self.host_budgets

    def gpu(self, call: Call, density: float) -> float:
        return _sum(self, call.sparse_terms(density))

    def seconds(self, call: Call, density: float) -> float:
        return max(self.host_of(call), self.gpu(call, density))

    def density_within(self, call: Call, seconds: float) -> float:
        """Largest share that a call can keep in that time; below 0 where none."""
        if seconds < self.host_of(call):
            return -1.0
        none, all_pairs = (self.gpu(call, share) for share in (0.0, 1.0))
        return (seconds - none) / (all_pairs - none)


@dataclass(frozen=True)
class DenseRates:
    """Rates of one of PyTorch's kernels in seconds, as in `SparseRates`."""

    host: float
    launch: float
    pair: float

    def gpu(self, call: Call) -> float:
        return _sum(self, call.dense_terms())

    def seconds(self, call: Call) -> float:
        return self.seconds_of(call.pairs)

    def seconds_of(self, pairs: int) -> float:
        """Seconds of a call in which so many pairs of a query and a key are computed."""
        return max(self.host, self.launch + self.pair * pairs)


@dataclass(frozen=True)
class Rates:
    """Rates of one kind of GPU and one head_dim.

    margin: share by which sparse has to be faster, the misfit of the formula.
    """

    sparse: SparseRates
    dense: Mapping[str, DenseRates]
    margin: float
    measuring: MeasuringRates | None = None
    """Rates of measurements; None where that was not measured."""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Rates:
        dense = {kernel: DenseRates(**rates) for kernel, rates in fields["dense"].items()}
        measuring = MeasuringRates.read(fields.get("measuring"))
        return cls(SparseRates(**fields["sparse"]), dense, fields["margin"], measuring)

    def dense_seconds(self, call: Call, kernel: str = "") -> float:
        """Seconds of a dense call. kernel: the one of PyTorch's that would serve; else the fastest
        is assumed."""
        known = self.dense.get(kernel)
        return min(each.seconds(call) for each in ([known] if known else self.dense.values()))

    def fastest_seconds(self, call: Call, kernel: str) -> float:
        """Seconds of a dense call by a faster kernel than `kernel`, where `faster_kernel` has
        one.
        """
        return self.dense_seconds(call, faster_kernel(call.pairs, self, kernel) or kernel)


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds, and the density below which a sparse call is faster for sure: 0 where none
    is, above 1 where even a call that drops nothing is."""

    sparse: float
    dense: float
    break_even: float


def estimate(call: Call, density: float, rates: Rates, dense_kernel: str = "") -> Estimate:
    """Estimates a call. dense_kernel: as in `Rates.dense_seconds`."""
    dense = rates.dense_seconds(call, dense_kernel)
    break_even = rates.sparse.density_within(call, dense / (1 + rates.margin))
    return Estimate(rates.sparse.seconds(call, density), dense, max(0.0, break_even))


def faster_kernel(pairs: int, rates: Rates, kernel: str) -> str | None:
    """Fastest of PyTorch's kernels for a dense call of so many pairs of a query and a key, if it is
    faster for sure than `kernel`."""
    if kernel not in rates.dense:
        return None
    seconds = {name: each.seconds_of(pairs) for name, each in rates.dense.items()}
    fastest = min(seconds, key=lambda name: seconds[name])
    return fastest if seconds[fastest] * (1 + rates.margin) < seconds[kernel] else None


def rates_for(gpu: str, head_dim: int) -> Rates | None:
    """Rates of a GPU by its name, for GPUs of one architecture differ; None where nothing was
    measured."""
    return _all_rates().get((gpu, head_dim))


def torch_kernel(q: Tensor, k: Tensor, v: Tensor, order: Sequence[SDPBackend] = ()) -> str:
    """Kernel that PyTorch's attention takes for these (B, H, N, D); "" when it is another.

    order: that of `sdpa_kernel`, where the caller sets one.
    """
    try:  # private: it may go one day, or take and give something else
        with sdpa_kernel(list(order), set_priority=True) if order else nullcontext():
            choose = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]
            choice = SDPBackend(choose(q, k, v))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return ""
    return next((name for name, backend in TORCH_KERNELS.items() if backend == choice), "")


def density_with_exact(topk: float, exact: float) -> float:
    """Share of pairs kept where query blocks rank in `topk` of all key blocks, and a share `exact`
    of the tokens (text) attends and is attended to densely."""
    return exact + (1 - exact) * min(1.0, exact + topk)


def _sum(rates: SparseRates | DenseRates, terms: Mapping[str, float]) -> float:
    return sum(getattr(rates, name) * times for name, times in terms.items())


def proportions_for(gpu: str, head_dim: int) -> Rates | None:
    """The GPU's own rates, or else those of `STAND_IN`; None for other devices.

    They say what one thing takes beside another, not how long anything takes, and only where that
    need not be exact. Whether sparse beats dense does need to be.
    """
    return (rates_for(gpu, head_dim) or rates_for(STAND_IN, head_dim)) if gpu else None


@lru_cache(maxsize=1)
def _all_rates() -> dict[tuple[str, int], Rates]:
    kinds = json.loads(RATES_FILE.read_text(encoding="utf-8"))
    return {
        (gpu, int(head_dim)): Rates.read(fields)
        for gpu, kind in kinds.items()
        for head_dim, fields in kind["head_dims"].items()
    }

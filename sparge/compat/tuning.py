# SPDX-License-Identifier: Apache-2.0
"""Search for the sparsest thresholds of each head within an error bound, all heads at once.

Thresholds are per head, so one sparse call tries another value on every head. A call of a layer is
searched by bisecting `cdfthreshd` for each of a few `simthreshd1`, then `pvthreshd`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import attention, make_plan
from ..blocks import BlockPlan
from ..policy import PV_FILTER_OFF, SparsePolicy
from .core import meansim_policy

#: Values tried for simthreshd1; below 0 no block is kept for being unlike itself.
SIMILARITIES = (-1.0, 0.25, 0.5, 0.75)
#: Values that are bisected, ascending, the last of them off. A model's cast to bf16 leaves them as
#: they are, or makes the cdfthreshd of a head that needs nearly everything a 1, which is stricter.
CDF_GRID = (*(k / 256 for k in range(256)), *(1 - 2.0**-k for k in range(9, 17)), 1.0)
PV_GRID = tuple(k / 4 for k in range(round(4 * PV_FILTER_OFF) + 1))
#: Heads that skip no more than this stay dense.
LEAST_SPARSITY = 0.1


@dataclass(frozen=True)
class Bounds:
    """Largest difference between a sparse output and the exact one, by head."""

    sim_rule: str
    l1: float
    pv_l1: float
    cos_sim: float
    rmse: float
    tune_pv: bool

    def __post_init__(self) -> None:
        if self.sim_rule not in ("l1", "cosine", "rmse"):
            raise ValueError(f"sim_rule is {self.sim_rule!r}; it takes 'l1', 'cosine' or 'rmse'.")
        if not 0 <= self.l1 < self.pv_l1:
            raise ValueError(
                f"l1 is {self.l1} and pv_l1 {self.pv_l1}; l1 takes a number from 0 up, and pv_l1, "
                "which bounds the error with the PV filter as well, a larger one."
            )
        if not (self.cos_sim <= 1 and self.rmse >= 0):
            raise ValueError(
                f"cos_sim is {self.cos_sim} and rmse {self.rmse}; they take a number up to 1, and "
                "one from 0 up."
            )

    def met(self, out: Tensor, exact: Tensor) -> Tensor:
        """(H,) bool: whether the head is close enough before the PV filter."""
        if self.sim_rule == "cosine":
            product = _head_sums(out * exact.float())
            lengths = (_head_sums(out.float() ** 2) * _head_sums(exact.float() ** 2)).sqrt()
            return product > self.cos_sim * lengths
        if self.sim_rule == "rmse":
            squares = _head_sums((out.float() - exact) ** 2)
            return squares < self.rmse**2 * exact[:, 0].numel()
        return relative_l1(out, exact) < self.l1


@dataclass(frozen=True, eq=False)
class Found:
    """Thresholds found for each of `SIMILARITIES` and each head, over all calls so far; (S, H)."""

    cdf_steps: Tensor  # int64, places in CDF_GRID
    pv_steps: Tensor  # int64, places in PV_GRID
    sparsity: Tensor  # float32, summed over the calls

    @classmethod
    def nothing(cls, heads: int, device: torch.device) -> Found:
        steps = torch.zeros(len(SIMILARITIES), heads, dtype=torch.int64, device=device)
        return cls(steps, steps, steps.float())


@dataclass(frozen=True, eq=False)
class Thresholds:
    """Thresholds of each head; all (H,)."""

    is_sparse: Tensor
    cdfthreshd: Tensor
    simthreshd1: Tensor
    pvthreshd: Tensor
    sparsity: Tensor

    @classmethod
    def best(cls, found: Found, calls: int) -> Thresholds:
        """Sparsest of what `calls` calls found; dense where that does not skip enough."""
        cdfthreshd, pvthreshd = _at(CDF_GRID, found.cdf_steps), _at(PV_GRID, found.pv_steps)
        sparsity = (found.sparsity / calls).masked_fill(cdfthreshd >= 1, 0)
        sparsity, row = sparsity.max(0)
        sparse = sparsity > LEAST_SPARSITY
        similarity = _at(SIMILARITIES, row)

        def chosen(of_rows: Tensor, dense: float) -> Tensor:
            return torch.where(sparse, of_rows.gather(0, row[None])[0], dense)

        return cls(
            is_sparse=sparse,
            cdfthreshd=chosen(cdfthreshd, 1.0),
            simthreshd1=torch.where(sparse, similarity, 1.0),
            pvthreshd=chosen(pvthreshd, PV_FILTER_OFF),
            sparsity=torch.where(sparse, sparsity, 0.0),
        )


@dataclass(frozen=True, eq=False)
class Layer:
    """One call of a layer, heads first, beside its exact output."""

    q: Tensor
    k: Tensor
    v: Tensor
    exact: Tensor
    is_causal: bool
    scale: float | None
    smooth_k: bool

    def search(self, bounds: Bounds, before: Found) -> Found:
        """The sparsest thresholds, none below those of `before`, with which this call keeps to
        `bounds`. Where even all of a head's blocks do not, its cdfthreshd is 1, its filter off.
        """
        rows = [
            self._search_at(similarity, bounds, before.cdf_steps[row], before.pv_steps[row])
            for row, similarity in enumerate(SIMILARITIES)
        ]
        cdf_steps, pv_steps, sparsity = (torch.stack(values) for values in zip(*rows, strict=True))
        return Found(cdf_steps, pv_steps, before.sparsity + sparsity)

    def _search_at(
        self, similarity: float, bounds: Bounds, least_cdf: Tensor, least_pv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        def policy(cdf_steps: Tensor, pvthreshd: Tensor | float) -> SparsePolicy:
            """Policy as calls that are not tuned have it: the first key block is kept."""
            cdfthreshd = _at(CDF_GRID, cdf_steps)
            return meansim_policy(None, cdfthreshd, similarity, pvthreshd, True, self.smooth_k)

        def close(cdf_steps: Tensor) -> Tensor:
            unfiltered = policy(cdf_steps, PV_FILTER_OFF)
            return bounds.met(self._attend(unfiltered, self._plan(unfiltered)), self.exact)

        cdf_steps = _least(close, least_cdf, len(CDF_GRID) - 1)
        plan = self._plan(policy(cdf_steps, PV_FILTER_OFF))

        def close_with_filter(pv_steps: Tensor) -> Tensor:
            out = self._attend(policy(cdf_steps, _at(PV_GRID, pv_steps)), plan)
            return relative_l1(out, self.exact) < bounds.pv_l1

        pv_steps = torch.full_like(cdf_steps, len(PV_GRID) - 1)
        if bounds.tune_pv:
            pv_steps = _least(close_with_filter, least_pv, len(PV_GRID) - 1)
        return cdf_steps, pv_steps, 1 - plan.kept_pairs().sum(0) / plan.valid_pairs().sum(0)

    def _plan(self, policy: SparsePolicy) -> BlockPlan:
        return make_plan(self.q, self.k, policy, is_causal=self.is_causal, scale=self.scale)

    def _attend(self, policy: SparsePolicy, plan: BlockPlan) -> Tensor:
        return attention(
            self.q, self.k, self.v, policy, plan=plan, is_causal=self.is_causal, scale=self.scale
        )


def _at(grid: tuple[float, ...], places: Tensor) -> Tensor:
    return torch.tensor(grid, device=places.device)[places]


def _least(enough: Callable[[Tensor], Tensor], least: Tensor, most: int) -> Tensor:
    """(H,): for each head the smallest of `least`..`most` that `enough` says yes to, else
    `most`.
    """
    low, high = least, torch.full_like(least, most)
    for _ in range(most.bit_length()):
        middle = (low + high) // 2
        yes = enough(middle)
        low, high = torch.where(yes, low, middle + 1), torch.where(yes, middle, high)
        low = torch.minimum(low, high)
    return high


def relative_l1(out: Tensor, exact: Tensor) -> Tensor:
    """(H,) float32: sum of |out - exact| over sum of |exact| of each head of (B, H, N, D)."""
    return _head_sums((out.float() - exact).abs()) / _head_sums(exact.float().abs()).clamp(
        min=torch.finfo(torch.float32).tiny
    )


def _head_sums(x: Tensor) -> Tensor:
    return x.sum((0, 2, 3))

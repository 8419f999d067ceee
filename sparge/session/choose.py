# SPDX-License-Identifier: Apache-2.0
"""The choice: each head takes the candidate of least  error x head weight + price x cost.

There is one price for all heads of all layers. It is found by bisection, for each sampling step, so
that the mean density, or the mean error, is what was asked for. All of it stays on the device of
the sums. Sums that decide are of integers, and products are rounded one by one, so that the same
sums give the same settings on every GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..head_settings import HeadSettings, Router
from ..policy import SparsePolicy
from .measure import POOL_WEIGHTS, Candidates, Sums

#: Least and greatest output scale. UNSURE: error expected of a scale in the calls that it serves, a
#: share of its logarithm (docs/experiments.md, How far an output scale may be off).
SCALES, UNSURE = (0.5, 2.0), 0.4
#: Relative error of 8-bit attention that drops nothing (docs/experiments.md, Error of 8 bits
#: alone).
ROUNDING = 0.005
LEAST_WEIGHT = 1e-6  # an infinite error stays infinite, whatever its head counts
#: Bisections of the price, in a range that every price of a choice is in.
BISECTIONS, PRICES = 50, (1e-12, 1e6)
#: Times that what is left of a budget, or of an error, is given to a head; it counts in models of
#: few heads.
FILLS = 8
UNIT = 2.0**32  # of densities and errors as integers: their sums over heads are exact


@dataclass(frozen=True, eq=False)
class Curves:
    """Errors of the heads of all measured layers over their candidates: the least of each cost."""

    candidates: Candidates
    error: Tensor
    """(heads, 2, densities): least relative error without and with pooled keys. Infinite where
    nothing finite is known."""
    which: Tensor
    """(heads, 2, densities) int64: token order x pool weight that gives it."""
    scale: Tensor
    """(heads, 2, densities): its output scale."""
    weight: Tensor
    """(heads,) head weights, mean 1; 0 in layers whose errors are not finite."""
    known: Tensor
    """(layers,) bool: whether the sums of a layer are finite."""

    @classmethod
    def of(cls, sums: Sums, candidates: Candidates) -> Curves:
        """Curves of the measured layers, in the order of their numbers."""
        layers = sorted(sums.of_layers)
        stacked = zip(*(sums.of_layers[layer] for layer in layers), strict=True)
        error, towards, far, norm = (torch.stack(x) for x in stacked)
        of_layers = (x.flatten(1).isfinite().all(1) for x in (error, towards, far, norm))
        known = torch.stack([*of_layers]).all(0)
        blocks = torch.tensor([[sums.blocks[layer]] for layer in layers], device="cpu")
        blocks = blocks.to(known.device, torch.float64, non_blocking=True)
        far, of_norm = far[..., None, None], norm[..., None, None]
        spread = error - 2 * towards + far  # |y - m|^2
        scale = (far / spread).sqrt()
        corrects = (far > 0) & (spread > 0) & candidates.scaled
        scale = torch.where(corrects, scale, 1.0).clamp(*SCALES)
        left = scale**2 * error + 2 * scale * (1 - scale) * towards + (1 - scale) ** 2 * far
        left = left.clamp(min=0) + (UNSURE * scale.log()) ** 2 * far
        relative = torch.where(of_norm > 0, left / of_norm, 0.0).sqrt()
        # Errors that do not rise with density.
        relative = relative.flip(-1).cummax(-1).values.flip(-1)
        fine, scales = candidates.errors_between(relative), candidates.between(scale)
        # (layers x heads, orders x pool weights, densities), plain dropping apart
        fine = fine.where(known.view(-1, 1, 1, 1, 1), torch.inf).flatten(0, 1)
        numbers = torch.arange(fine[0, ..., 0].numel(), device=fine.device).view(fine.shape[1:3])
        errors, which = [], []
        for weights in (slice(0, 1), slice(1, None)):
            of_cost = fine[:, :, weights].flatten(1, 2).min(1)
            errors.append(of_cost.values)
            which.append(numbers[:, weights].flatten()[of_cost.indices])
        taken = torch.stack(which, 1)
        scale_of = scales.flatten(0, 1).flatten(1, 2)
        return cls(
            candidates,
            torch.stack(errors, 1),
            taken,
            scale_of.gather(1, taken),
            _head_weight(norm.amax(-1).sqrt() / blocks.sqrt(), known).flatten(),
            known,
        )

    def chosen(self, budgets: Sequence[float] = (), error: float | None = None) -> Tensor:
        """(steps, heads) choices among the 2 x densities of each head.

        budgets: mean density of each step, at which errors are least. Heads are as little dense as
            they can be where even that is more than the budget.
        error: in place of budgets, the mean error of heads by their weights, which is reached at
            the least mean cost. One choice serves all steps.
        """
        costs, kept = self.candidates.costs().flatten(), self.candidates.kept.repeat(2)
        errors = self.error.flatten(1)
        counts = self.weight > 0
        loss = torch.where(counts[:, None], errors * self.weight.clamp(min=LEAST_WEIGHT)[:, None],
                           0.0)  # fmt: skip
        if error is None:
            measure = _integers(kept).expand_as(errors) * counts[:, None]
            asked = torch.tensor(budgets, dtype=torch.float64, device="cpu")
            asked = asked.to(costs.device, non_blocking=True)
            most = (asked * UNIT * counts.sum()).long() + len(counts)  # what rounding may add
        else:
            whole = (errors.square() + ROUNDING**2).sqrt() * self.weight[:, None]
            measure = _integers(torch.where(counts[:, None], whole.clamp(max=UNIT), 0.0))
            most = (error * _integers(self.weight).sum().double()).long()[None]
        cheap, dear = self._between(loss, costs, measure, most, of_error=error is not None)
        # Heads move from the cheap choice to the dear one, the ones of most effect first, as far as
        # the budget goes, or until the error is met.
        gain, more = _of(loss, cheap) - _of(loss, dear), costs[dear] - costs[cheap]
        order = (gain / more.clamp(min=1e-12)).argsort(dim=1, descending=True, stable=True)
        at_cheap = _of(measure, cheap)
        steps = (_of(measure, dear) - at_cheap).gather(1, order)
        left, reached = (most - at_cheap.sum(1))[:, None], steps.cumsum(1)
        fits = (reached > left).cumsum(1) == 0
        moved = fits if error is None else reached - steps > left
        moved = torch.zeros_like(moved).scatter(1, order, moved)
        found = torch.where(moved, dear, cheap)
        saved = loss if error is None else costs.expand_as(loss)
        return _filled(found, saved, measure, most)

    def _between(
        self, loss: Tensor, costs: Tensor, measure: Tensor, most: Tensor, of_error: bool
    ) -> tuple[Tensor, Tensor]:
        """Choices (steps, heads) at the two prices that lie next to what is asked for: the cheap
        one, and the dear one."""

        def at(price: Tensor) -> Tensor:
            return (loss + price[:, None, None] * costs).argmin(2)

        low, high = (torch.full_like(most, x, dtype=torch.float64) for x in PRICES)
        for _ in range(BISECTIONS):
            middle = (low * high).sqrt()
            reached = _of(measure, at(middle)).sum(1)
            # At a higher price heads are less dense, and their errors greater.
            is_cheap = reached > most if of_error else reached <= most
            low, high = torch.where(is_cheap, low, middle), torch.where(is_cheap, middle, high)
        return at(high), at(low)

    def settings(self, chosen: Tensor) -> ChosenSettings:
        """Settings of the heads that were chosen, (steps, heads)."""
        densities = len(self.candidates.kept)
        which = _of(self.which.flatten(1), chosen)
        density = chosen % densities
        weights = torch.tensor(POOL_WEIGHTS, dtype=torch.float32, device="cpu")
        shape = len(chosen), len(self.known), -1
        error, scale = (_of(x.flatten(1), chosen) for x in (self.error, self.scale))
        on_device = weights.to(chosen.device, non_blocking=True)
        return ChosenSettings(
            self.candidates.asked[density].view(shape),
            on_device[which % len(POOL_WEIGHTS)].view(shape),
            (which // len(POOL_WEIGHTS)).int().view(shape),
            scale.float().view(shape) if self.candidates.scaled else None,
            self.candidates.kept[density].float().view(shape),
            (error.square() + ROUNDING**2).sqrt().float().view(shape),
            self.weight.float().view(shape[1:]),
        )


@dataclass(frozen=True, eq=False)
class ChosenSettings:
    """Settings of the heads of all measured layers in some steps: (steps, layers, heads), on their
    device."""

    density: Tensor
    pool_weight: Tensor
    order_kind: Tensor
    output_scale: Tensor | None
    """None where heads have none."""
    kept: Tensor
    """Share of pairs that the density keeps."""
    error: Tensor
    """Expected relative error of the output."""
    weight: Tensor
    """(layers, heads): head weights."""

    def of_step(
        self, step: int, policy: SparsePolicy, orders: int
    ) -> Callable[[int], HeadSettings]:
        """Settings of one step by layer, for calls of `policy`. orders: number of token orders of a
        head; of one, no head says which.

        They are made when each layer asks: before a pass the device waits for the host, in the pass
        the host has time. All are views of one, so that making them allocates nothing.
        """
        density, weight, kind = (
            x[step].flatten() for x in (self.density, self.pool_weight, self.order_kind)
        )
        scale = None if self.output_scale is None else self.output_scale[step].flatten()
        router, kind = torch.full_like(kind, Router.ERROR), kind if orders > 1 else None
        whole = HeadSettings(density, weight, router, order_kind=kind, output_scale=scale)
        whole.table(policy)  # single ones take seven launches a layer
        heads = self.density.shape[2]
        return cache(lambda layer: whole.heads_slice(slice(layer * heads, (layer + 1) * heads)))


def _head_weight(norms: Tensor, known: Tensor) -> Tensor:
    """(layers, heads) head weights of mean 1 over known layers: what the relative error of a head
    counts beside those of others.

    The outputs of all heads of a layer go through one projection, so heads count by the norm of
    their output. Layers count by the root of theirs: each adds to a sum that grows from layer to
    layer, and has its own gate (docs/experiments.md, Head weights).
    """
    norms = norms.where(known[:, None], 0.0)
    norms = norms / norms.amax().clamp(min=torch.finfo(torch.float64).tiny)
    of_layers = (_integers(norms).sum(1, keepdim=True) / norms.shape[1] / UNIT).sqrt()
    counts = torch.where(of_layers > 0, norms / of_layers, 0.0)
    mean = _integers(counts).sum() / UNIT / (known.sum() * norms.shape[1])
    weight = torch.where(mean > 0, counts / mean, 1.0).clamp(min=LEAST_WEIGHT)
    return weight.where(known[:, None], 0.0)


def _filled(found: Tensor, value: Tensor, measure: Tensor, most: Tensor) -> Tensor:
    """Choices (steps, heads) after a few more moves, which spend what is left below `most`: each
    time that head moves whose value falls most for what it adds to the measure. value, measure:
    (heads, choices)."""
    for _ in range(FILLS):
        now = _of(measure, found)
        left = (most - now.sum(1))[:, None, None]
        more, fall = measure - now[..., None], _of(value, found)[..., None] - value
        worth = torch.where((more > 0) & (more <= left), fall / more.clamp(min=1), 0.0)
        best = worth.flatten(1).max(1)
        head, choice = best.indices // measure.shape[1], best.indices % measure.shape[1]
        taken = torch.where(best.values > 0, choice, found.gather(1, head[:, None])[:, 0])
        found = found.scatter(1, head[:, None], taken[:, None])
    return found


def _integers(values: Tensor) -> Tensor:
    return (values * UNIT).round().long()


def _of(values: Tensor, chosen: Tensor) -> Tensor:
    """(steps, heads) values (heads, choices) of what was chosen."""
    return values.expand(len(chosen), *values.shape).gather(2, chosen.unsqueeze(2)).squeeze(2)

# SPDX-License-Identifier: Apache-2.0
"""Heads of one kind of calls on one device: measured while dense, chosen, measured again.

1. In the last dense step each layer's call is measured once for each prompt.
2. A call that may be sparse while nothing is known of its layer is dense, and measured: so is the
   first step of a run without dense ones.
3. In the step before each further choice sparse calls of the first prompt are measured, and what
   they computed is compared with what they should have.
Whatever was measured is chosen from where the next sparse step begins; that waits for the device.
Sizes and sums alone decide, so that two machines give one clip.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import Unsupported
from ..head_settings import HeadSettings
from ..order.grid import (
    EMPTY,
    TokenGrid,
    TokenOrder,
    grid_order,
    order_as_dealt,
    raster_order,
    unmeasured_order,
)
from ..order.variants import VARIANTS
from ..policy import SparsePolicy
from ..reasons import Reason
from .calls import Call, Untracked
from .choose import ChosenSettings, Curves
from .measure import Candidates, Measured, MeasuredCall, Sums, measure, spread_places
from .report import MeasuredHeads
from .schedule import CHOICES, Aim, Step, budgets, next_choice
from .timing import Times

#: Query blocks of every head that a measured step looks at, of all prompts together
#: (docs/experiments.md, Query blocks of a measurement).
BLOCKS = 8
#: Prompts that a run is taken to have where no step before the measured one tells.
USUAL_PROMPTS = 2
#: Times that heads are measured again (docs/experiments.md, Choosing anew and measuring again).
AGAIN = CHOICES - 1
NEVER = sys.maxsize  # step of a choice that does not come

MEASURING = Reason("measuring", "measuring")
NOT_MEASURED = Reason("this layer could not be measured", "range")
NO_MEMORY = Reason("not enough memory to measure this layer", "memory")
TOO_SHORT = Reason("too few steps are left to pay for measuring", "few steps")
ALL_EXACT = Reason("every query block holds text, which stays exact", "text")
#: Measuring, or sparse computation, raised an error.
FAILED = Reason("an error of Sparge Attention (see the log)", "error")
NAN_OF_MODEL = Reason("the model gave NaN here, without Sparge Attention's doing", "NaN")
INF_OF_MODEL = Reason("the model gave inf here, without Sparge Attention's doing", "NaN")


@dataclass(frozen=True)
class Shape:
    """Shape of calls whose heads share settings: prompts of one length do."""

    tokens: int
    heads: int
    grid: TokenGrid | None
    """Token grid; None where the tokens stay in the order they come."""
    ranks: int = 1
    """Processes that share the tokens outside of attention, which sees them as dealt."""
    shares_keys: bool = False
    """Whether several heads read the same keys (GQA)."""

    def orders(self) -> list[TokenOrder]:
        """Token orders that steps take in turn, the first of them measured."""
        if self.grid is None:
            return [raster_order(self.tokens)]
        variants = (grid_order(self.grid, variant) for variant in range(VARIANTS))
        return [order_as_dealt(order, self.grid, self.ranks) for order in variants]


def unmeasured(grid: TokenGrid, ranks: int, step: int, device: torch.device) -> TokenOrder:
    """Order on the device of calls over a grid, whose tokens so many ranks share, in a step where
    all heads follow one policy: steps take several in turn."""
    return order_as_dealt(unmeasured_order(grid, step % VARIANTS), grid, ranks).on(device)


#: Device and number of the model that calls are of.
Place = tuple[torch.device, int]


class RunHeads:
    """Heads of the calls of one run by place and shape. Several threads may ask for them."""

    def __init__(self, aim: Aim, untracked: Untracked, draw: int) -> None:
        self._aim, self._untracked, self._draw = aim, untracked, draw
        self.by_shape: dict[tuple[Place, Shape], Heads] = {}
        self._prompts: dict[tuple[Place, Shape], set[int]] = defaultdict(set)
        self._lock = threading.Lock()

    def of_shape(self, place: Place, shape: Shape, policy: SparsePolicy) -> Heads:
        """Heads of the calls of a shape, made for the first. policy: as the device runs it."""
        key = place, shape
        with self._lock:
            if key not in self.by_shape:
                prompts = sorted(self._prompts[key])
                self.by_shape[key] = Heads(
                    shape, self._aim, policy, place[0], prompts, self._untracked, self._draw
                )
            return self.by_shape[key]

    def saw(self, place: Place, shape: Shape, prompts: Sequence[int]) -> None:
        """Notes the prompts of calls of a shape before the measured step."""
        with self._lock:
            self._prompts[place, shape].update(prompts)

    def begin_pass(self, place: Place, step: Step) -> None:
        """Begins a pass for the heads of a place. Waits for the device where they are chosen."""
        with self._lock:
            found = [heads for (where, _), heads in self.by_shape.items() if where == place]
        for heads in found:
            heads.begin_pass(step)

    def report(self) -> tuple[MeasuredHeads, ...]:
        """Reports of the shapes whose heads were chosen. Waits for the devices."""
        return tuple(heads.report() for heads in self.by_shape.values() if heads.given)


class Heads:
    """Heads of the calls of one shape on one device; only what says so waits for it."""

    def __init__(
        self,
        shape: Shape,
        aim: Aim,
        policy: SparsePolicy,
        device: torch.device,
        prompts: Sequence[int],
        untracked: Untracked,
        draw: int = 0,
    ) -> None:
        """policy: as the device runs it. prompts: of calls of this shape in earlier steps. draw:
        other query blocks are measured for another one."""
        self.shape, self.aim, self.policy, self.device = shape, aim, policy, device
        orders = shape.orders()
        self._orders = [order.on(device) for order in orders]
        self.candidates = Candidates.of(orders[0], device, shape.shares_keys, policy.precision)
        self.least = self.candidates.least
        """Share of pairs that is kept whatever is chosen."""
        self._query_blocks: list[int] = (~orders[0].queries_exact).nonzero().flatten().tolist()
        self.why_dense: Reason | None = None if self._query_blocks else ALL_EXACT
        self.settings: ChosenSettings | None = None
        """Settings since the last choice; None before the first."""
        self.given: list[tuple[ChosenSettings, int, dict[int, int]]] = []
        """Settings of each sparse step so far, its number among their steps, and the place of each
        layer in them."""
        self.sparse_rows: set[int] = set()
        """Layers whose calls are sparse, in some pass at least."""
        self._untracked, self._draw = untracked, draw
        # Each prompt is measured once: its share of the query blocks.
        self._blocks_a_prompt = max(1, BLOCKS // (len(set(prompts)) or USUAL_PROMPTS))
        self._refusals: dict[int, Reason] = {}
        self._sums, self._known = Sums(), Sums()  # since the last choice, and those it was made of
        self._largest: dict[int, Tensor] = {}  # magnitude in dense results that were measured
        self._made: dict[int, Tensor] = {}  # (2, heads): squares of sparse errors, of norms
        self._seen: dict[int, int] = {}  # query blocks measured of each layer so far
        self._measured: set[tuple[int, int]] = set()  # layers and prompts since the last choice
        self._is_new = False  # whether a layer was measured of which nothing was known
        self._step: Step | None = None  # of the running pass
        self._first: Step | None = None  # of the first pass that might be sparse
        self._passed = -1  # steps from that one to the running one
        self._origin = 0  # of these, steps before the first choice
        self._steps: int | None = None  # sparse steps from the first choice on
        self._index = -1  # number of the running sparse step
        self._next, self._left = 0, AGAIN  # sparse step of the next choice, and choices to come
        self._chosen_at = 0  # sparse step of the last choice
        self._places: dict[int, int] = {}  # of the layers in its settings
        self._kept: list[list[float]] = []  # mean share of pairs, by its steps and layers
        self._now: Callable[[int], HeadSettings] | None = None
        self.measures_again = False
        """Whether sparse calls of the running pass are measured."""

    def begin_pass(self, step: Step) -> None:
        """Begins a pass. Waits for the device where heads are chosen."""
        self._step = step
        if step.why_dense is not None:
            return
        self._first = self._first or step
        passed = step.index_since(self._first)
        if passed <= self._passed:  # another prompt, or a sampler that goes back
            return
        self._passed = passed
        if self.settings is None and self._sums:
            steps = self._first.of_sparse
            self._origin = passed
            self._steps = None if steps is None else steps - passed - (self._first.index or 0)
            self._choose(0)
        elif self.settings is not None and (self._is_new or passed - self._origin >= self._next):
            self._choose(passed - self._origin)
        if self.settings is not None:
            self._begin_step(self.settings, passed - self._origin)

    def order(self, step: int) -> TokenOrder | None:
        """Token order in which the calls of a step are sparse."""
        return self._orders[step % VARIANTS] if self.shape.grid is not None else None

    def of_layer(self, row: int, times: Times | None) -> HeadSettings | Reason:
        """Settings of a sparse call of a layer, or why it has to stay dense."""
        if (refusal := self.refusal(row)) is not None:
            return refusal
        if self._now is None or row not in self._places:
            return MEASURING
        place = self._places[row]
        kept = self._kept[min(self._index - self._chosen_at, len(self._kept) - 1)][place]
        if times is not None and (slower := times.why_slower(kept)) is not None:
            return slower
        self.sparse_rows.add(row)
        return self._now(place)

    def refusal(self, row: int) -> Reason | None:
        """Reason why a layer stays dense whatever comes, or None."""
        return self.why_dense or self._refusals.get(row)

    def measure(
        self,
        row: int,
        call: Call,
        times: Times | None,
        dense: Callable[[], Tensor],
        timed: Untracked,
    ) -> None:
        """Measures a dense call, where this pass measures its layer and sparse calls may be faster.
        dense: gives the call's result. timed: makes the context around measuring alone."""
        prompts = self._prompts_to_measure(row)
        if not prompts or self.refusal(row) is not None:
            return
        if times is not None:
            if (slower := times.why_slower(self.least)) is not None:
                self._refusals[row] = slower
                return
            if not self._seen and not self._pays(times):
                self.why_dense = TOO_SHORT
                return
        out = dense()  # errors raised here have nothing to do with measuring
        try:
            with self._untracked(), timed():
                largest = torch.stack(torch.aminmax(call.result_heads_first(out))).abs().max()
                self._largest[row] = torch.maximum(self._largest.get(row, largest), largest)
                for prompt in prompts:
                    q, k, v = (self._of_prompt(prompt, x) for x in call.qkv)
                    self._add(row, call, q, k, v, self._blocks_a_prompt)
                    self._measured.add((row, prompt))
        except Unsupported as refusal:
            self._refusals[row] = Reason(*refusal.args)
        except torch.OutOfMemoryError:  # the dense call may fit all the same
            self._refusals[row] = NO_MEMORY
        except Exception:
            self._refusals[row] = FAILED  # once is enough
            raise
        self._is_new |= self.settings is not None

    def measure_again(self, row: int, call: Call, out: Tensor) -> None:
        """Measures a sparse call that gave `out`, once a layer: its first prompt as a dense call's,
        and the error of `out`. Without memory for it the layer keeps what was measured before."""
        assert self._step is not None
        if (row, 0) in self._measured or 0 not in self._step.prompts:
            return
        self._measured.add((row, 0))
        with suppress(torch.OutOfMemoryError), self._untracked():
            q, k, v, out = (
                self._of_prompt(0, x) for x in (*call.qkv, call.result_heads_first(out))
            )
            asked, measured = self._add(row, call, q, k, v, BLOCKS, with_truth=True)
            assert measured.truth is not None
            tokens = asked.tokens.flatten()
            holds = (tokens != EMPTY).unsqueeze(-1)
            truth = measured.truth.flatten(2, 3).float() * holds
            off = out.index_select(2, tokens.clamp(min=0)).float() * holds - truth
            squares = torch.stack([x.square().sum((0, 2, 3), dtype=torch.float64)
                                   for x in (off, truth)])  # fmt: skip
            self._made[row] = self._made.get(row, 0) + squares

    def report(self) -> MeasuredHeads:
        """Report of heads that were chosen. Waits for the device."""
        rows = sorted(self.sparse_rows)
        density, expected = (self._of_steps(name, rows).nanmean(0) for name in ("kept", "error"))
        weight = self._of_steps("weight", rows, slice(-1, None))[0]
        found = torch.full_like(density, torch.nan)
        for place, row in enumerate(rows):
            if row in self._made:
                off, norm = self._made[row].cpu()
                found[place] = (off / norm).sqrt()
        return MeasuredHeads(self.shape.tokens, rows, density, expected, found, weight)

    def _of_steps(self, name: str, rows: Sequence[int], steps: slice = slice(None)) -> Tensor:
        """(steps, rows, heads) float32 on the CPU: values of settings; NaN of layers that were not
        known yet."""
        found = []
        for settings, step, places in self.given[steps]:
            values = getattr(settings, name)
            values = (values if name == "weight" else values[step]).float().cpu()
            nothing = torch.full_like(values[0], torch.nan)
            of_rows = [values[places[row]] if row in places else nothing for row in rows]
            found.append(torch.stack(of_rows) if rows else values[:0])
        return torch.stack(found)

    def _pays(self, times: Times) -> bool:
        """Whether sparse calls can save more than measuring takes."""
        assert self._step is not None
        least = max(self.least, self.aim.value if self.aim.kind == "budget" else 0.0)
        steps, saved = self._step.of_sparse, times.dense - times.sparse(least)
        return steps is None or steps * saved > (1 + AGAIN) * times.measuring

    def _prompts_to_measure(self, row: int) -> list[int]:
        """Prompts of the running pass for which a dense call of a layer is measured."""
        assert self._step is not None
        wanted = self._step.is_last_dense or self._step.why_dense is None
        if not wanted or row in self._known.blocks:
            return []
        return [x for x in dict.fromkeys(self._step.prompts) if (row, x) not in self._measured]

    def _of_prompt(self, prompt: int, x: Tensor) -> Tensor:
        """Entries of a prompt in the batch of the running pass. Prompts count one by one, as if
        they had not been put into one batch. A batch that others made counts as one."""
        assert self._step is not None
        entries, others = divmod(x.shape[0], len(self._step.prompts))
        place = self._step.prompts.index(prompt)
        return x if others else x[place * entries : (place + 1) * entries]

    def _add(
        self, row: int, call: Call, q: Tensor, k: Tensor, v: Tensor, count: int,
        with_truth: bool = False,
    ) -> tuple[MeasuredCall, Measured]:  # fmt: skip
        """Measures so many query blocks, other ones than before, evenly spread."""
        seen = self._seen.get(row, 0)
        first = self._draw + seen + row  # neighbouring layers look at other ones
        places = spread_places(len(self._query_blocks), first, count)
        blocks = [self._query_blocks[place] for place in places]
        order, scale = self._orders[0], call.softmax_scale
        asked = MeasuredCall(q, k, v, scale, order, self.candidates, blocks)
        measured = measure(asked, with_truth)
        self._sums.add(row, measured, len(blocks))
        self._seen[row] = seen + len(blocks)
        return asked, measured

    def _choose(self, index: int) -> None:
        """Chooses for the steps from this one to the next choice, from what was measured so far.
        Waits for the device once."""
        known, following, left = self._sums.or_else(self._known), self._next, self._left
        if index >= following:
            following, left = next_choice(index, self._steps, left) or NEVER, max(0, left - 1)
        curves = Curves.of(known, self.candidates)
        if self.aim.kind == "quality":
            chosen = curves.chosen(error=self.aim.value)
        else:
            of_steps = budgets(self.aim.value, self._steps or 1, self.least)
            chosen = curves.chosen(of_steps[index:following] or of_steps[-1:])
        settings, rows = curves.settings(chosen), sorted(known.blocks)
        kept, none = settings.kept.mean(2), torch.zeros((), device=self.device)
        largest = torch.stack([self._largest.get(row, none).to(kept.dtype) for row in rows])
        told = torch.cat([kept, curves.known[None].to(kept.dtype), largest[None]]).tolist()
        # From here on nothing waits: a choice that was interrupted is made in the next step.
        *self._kept, finite, largest = told
        for row, is_finite, extreme in zip(rows, finite, largest, strict=True):
            if not math.isfinite(extreme):
                reason = INF_OF_MODEL if extreme == math.inf else NAN_OF_MODEL
                self._refusals.setdefault(row, reason)
            elif not is_finite:
                self._refusals.setdefault(row, NOT_MEASURED)
        self.settings, self._known, self._sums = settings, known, Sums()
        self._places = {row: place for place, row in enumerate(rows)}
        self._chosen_at, self._next, self._left = index, following, left
        self._is_new = False
        self._measured.clear()

    def _begin_step(self, settings: ChosenSettings, index: int) -> None:
        """Takes the settings of a step."""
        self._index, self.measures_again = index, index + 1 == self._next
        place = min(index - self._chosen_at, len(settings.density) - 1)
        if not self.given or self.given[-1][:2] != (settings, place):
            self._now = settings.of_step(place, self.policy, self.candidates.orders)
        self.given.append((settings, place, self._places))


@dataclass(eq=False)
class SparseTerms:
    """Terms on which calls of a pass that look alike are sparse, found out at the first of them."""

    policy: SparsePolicy
    """With what stays exact at either end."""
    heads: Heads | None = None
    """None where all heads follow the policy, or before they are measured."""
    times: Times | None = None
    foretold: float | None = None
    """Seconds of an exact call; None where nobody timed those."""
    why_slower: Reason | None = None
    """Why calls whose heads follow the policy would be slower sparse."""
    order: TokenOrder | None = None
    """Token order of this step where all heads follow the policy."""

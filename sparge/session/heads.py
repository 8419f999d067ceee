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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import Unsupported
from ..head_settings import HeadSettings
from ..order.grid import EMPTY, TokenGrid, TokenOrder, grid_order, raster_order
from ..order.places import order_as_dealt
from ..order.variants import VARIANTS
from ..policy import SparsePolicy
from .calls import Call
from .candidates import Candidates
from .choose import Curves, Settings, StepSettings
from .measure import MeasuredCall, Sums, measure, spread_places
from .schedule import Aim, Step, budgets, next_choice
from .timing import Times

#: Query blocks of every head that a measured step looks at, of all prompts together
#: (docs/experiments.md, Query blocks of a measurement).
BLOCKS = 8
#: Prompts that a run is taken to have where no step before the measured one tells.
USUAL_PROMPTS = 2
#: Times that heads are measured again (docs/experiments.md, Choosing anew and measuring again).
AGAIN = 2
NEVER = sys.maxsize  # step of a choice that does not come

MEASURING = "measuring"
NOT_MEASURED = "this layer could not be measured"
NO_ROOM = "more attention calls in one block than there is room for"
NO_MEMORY = "not enough memory to measure this layer"
TOO_SHORT = "too few steps are left to pay for measuring"
ALL_EXACT = "every query block holds text, which stays exact"
#: Measuring, or sparse computation, raised an error.
FAILED = "an error of Sparge Attention (see the log)"
NAN_OF_MODEL = "the model gave NaN here, without Sparge Attention's doing"
INF_OF_MODEL = "the model gave inf here, without Sparge Attention's doing"

#: Context around allocations that other calls of a layer do without.
Untracked = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Shape:
    """Shape of calls whose heads share settings: prompts of one length do."""

    tokens: int
    heads: int
    grid: TokenGrid | None
    """Token grid; None where the tokens stay in the order they come."""
    rows: int
    """Layers of the pass; prompts with more VACE controls make more calls."""
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


@dataclass(eq=False)
class Found:
    """What measuring found while steps were sparse, beside the sums: error that sparse calls made."""

    squares: Tensor
    """(2, layers, heads) float64: |out - o|^2 and |o|^2 over compared rows."""

    def add(self, row: int, out: Tensor, truth: Tensor) -> None:
        """out, truth: (B, H, rows, D); rows that are no tokens are 0 in both."""
        off = (out.float() - truth.float()).square().sum((0, 2, 3), dtype=torch.float64)
        norm = truth.float().square().sum((0, 2, 3), dtype=torch.float64)
        self.squares[:, row] += torch.stack([off, norm])


class Heads:
    """Heads of the calls of one shape on one device; only what says so waits for it."""

    def __init__(
        self,
        shape: Shape,
        aim: Aim,
        policy: SparsePolicy,
        device: torch.device,
        untracked: Untracked,
        draw: int = 0,
    ) -> None:
        """policy: as the device runs it. draw: other query blocks are measured for another one."""
        self.shape, self.aim, self.policy, self.device = shape, aim, policy, device
        self._untracked, self._draw = untracked, draw
        self._orders = [order.on(device) for order in shape.orders()]
        self.candidates = Candidates.of(shape.orders()[0], device, shape.shares_keys)
        self.least = self.candidates.least
        exact = shape.orders()[0].queries_exact.cpu()
        self._blocks: list[int] = (~exact).nonzero().flatten().tolist()
        self.why_dense: str | None = None if self._blocks else ALL_EXACT
        self.settings: Settings | None = None
        """Settings since the last choice; None before the first."""
        self.given: list[tuple[Settings, int]] = []
        """Settings of each sparse step so far, and their step among those."""
        self.sparse_rows: set[int] = set()
        self.found: Found | None = None
        self._refusals: dict[int, str] = {}
        self._sums: Sums | None = None  # since the last choice
        self._known: Sums | None = None  # of the last choice
        self._extremes: Tensor | None = None  # (rows,) largest magnitude of dense results
        self._seen = [0] * shape.rows  # query blocks measured of each layer so far
        self._measured: set[tuple[int, int]] = set()  # layers and prompts since the last choice
        self._earlier: set[int] = set()  # prompts of the steps before the measured one
        self._is_new = False  # whether a layer was measured of which nothing was known
        self._step: Step | None = None  # of the running pass
        self._first: Step | None = None  # of the first sparse pass
        self._passed = -1  # steps from that one to the running one
        self._origin = 0  # of these, steps before the first choice
        self._steps: int | None = None  # sparse steps from the first choice on
        self._index = -1  # number of the running sparse step
        self._next, self._left = 0, AGAIN  # sparse step of the next choice, and choices to come
        self._kept: list[list[float]] = []  # mean share of pairs by step since the choice and layer
        self._chosen_at = 0
        self._now: StepSettings | None = None

    @property
    def measures_again(self) -> bool:
        """Whether sparse calls of the running pass are measured."""
        return self._index + 1 == self._next and self.settings is not None

    def begin_pass(self, step: Step) -> None:
        """Begins a pass. Waits for the device where heads are chosen."""
        self._step = step
        if step.why_dense is not None:
            if not step.is_last_dense:
                self._earlier.update(step.prompts)
            return
        self._first = self._first or step
        passed = step.index_since(self._first)
        if passed <= self._passed:  # another prompt, or a sampler that goes back
            return
        self._passed = passed
        if self.settings is None:
            if self._sums is not None:
                steps = self._first.of_sparse
                self._origin = passed
                self._steps = None if steps is None else steps - passed - (self._first.index or 0)
                self._choose(0)
        elif self._is_new or passed - self._origin >= self._next:
            self._choose(passed - self._origin)
        if self.settings is not None:
            self._begin_step(passed - self._origin)

    def order(self, step: int) -> TokenOrder | None:
        """Token order in which the calls of a step are sparse."""
        return self._orders[step % VARIANTS] if self.shape.grid is not None else None

    def of_layer(self, row: int, times: Times | None) -> HeadSettings | str:
        """Settings of a sparse call of a layer, or why it has to stay dense."""
        if (refusal := self.refusal(row)) is not None:
            return refusal
        if self.settings is None or self._now is None:
            return MEASURING
        if self._known is None or not self._known.blocks[row]:
            return MEASURING if self._seen[row] else NOT_MEASURED
        kept = self._kept[min(self._index - self._chosen_at, len(self._kept) - 1)][row]
        if times is not None and (slower := times.why_slower(kept)) is not None:
            return slower
        self.sparse_rows.add(row)
        return self._now.of_layer(row)

    def refusal(self, row: int) -> str | None:
        """Reason why a layer stays dense whatever comes, or None."""
        return self.why_dense or (NO_ROOM if row >= self.shape.rows else self._refusals.get(row))

    def measure(
        self, row: int, call: Call, times: Times | None, dense: Callable[[], Tensor]
    ) -> None:
        """Inside a call that is dense for now: measures it if it is to be, and if it may ever be
        faster sparse. dense: gives its result."""
        prompts = self._prompts_to_measure(row)
        if not prompts or self.refusal(row) is not None:
            return
        if times is not None:
            if (slower := times.why_slower(self.least)) is not None:
                self._refusals[row] = slower
                return
            if self._sums is self._known and not self._pays(times):  # both None: nothing is known
                self.why_dense = TOO_SHORT
                return
        out = dense()  # errors raised here have nothing to do with measuring
        try:
            with self._untracked():
                self._look(row, call.result_heads_first(out))
                count = BLOCKS // (len(self._earlier) or USUAL_PROMPTS)
                for prompt, q, k, v in self._entries(call, prompts):
                    self._add(row, q, k, v, call, max(1, count))
                    self._measured.add((row, prompt))
        except Unsupported as refusal:
            self._refusals[row] = refusal.reason
        except torch.OutOfMemoryError:  # the dense call may fit all the same
            self._refusals[row] = NO_MEMORY
        except Exception:
            self._refusals[row] = FAILED  # once is enough
            raise
        self._is_new |= self.settings is not None

    def measure_again(self, row: int, call: Call, out: Tensor) -> None:
        """Inside a sparse call that gave `out`: measures the first prompt, once a layer."""
        assert self._step is not None
        if (row, 0) in self._measured or 0 not in self._step.prompts:
            return
        self._measured.add((row, 0))
        try:
            with self._untracked():
                ((_, q, k, v),) = self._entries(call, [0])
                ((_, rows, *_),) = self._entries(call, [0], call.result_heads_first(out))
                measured = self._add(row, q, k, v, call, BLOCKS, with_truth=True)
                if self.found is None:
                    size = 2, self.shape.rows, self.shape.heads
                    zeros = torch.zeros(size, dtype=torch.float64, device=self.device)
                    self.found = Found(zeros)
                tokens, truth = measured
                holds = (tokens != EMPTY).flatten()[:, None]
                taken = rows.index_select(2, tokens.clamp(min=0).flatten())
                self.found.add(row, taken * holds, truth.flatten(2, 3) * holds)
        except torch.OutOfMemoryError:
            pass  # settings go on from what was measured before

    def forget_copies(self) -> None:
        for order in self.shape.orders():
            order.forget_copies()

    def _pays(self, times: Times) -> bool:
        """Whether sparse calls can save more than measuring takes."""
        assert self._step is not None
        steps = self._step.of_sparse
        least = self.aim.value if self.aim.kind == "budget" else self.least
        saved = times.dense - times.sparse(max(least, self.least))
        return steps is None or steps * saved > (1 + AGAIN) * times.measuring

    def _prompts_to_measure(self, row: int) -> list[int]:
        """Prompts of the running pass for which a dense call of a layer is measured."""
        assert self._step is not None
        known = self._known is not None and row < self.shape.rows and self._known.blocks[row]
        if not (self._step.is_last_dense or self._step.why_dense is None) or known:
            return []
        return [x for x in dict.fromkeys(self._step.prompts) if (row, x) not in self._measured]

    def _entries(
        self, call: Call, prompts: Sequence[int], q: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yields each prompt with q, k and v of its entries of the batch. Prompts count one by one,
        as if they had not been put into one batch. One that others made counts as one."""
        assert self._step is not None
        qkv = (call.q if q is None else q), call.k, call.v
        rows, others = divmod(call.q.shape[0], len(self._step.prompts))
        for prompt in prompts:
            place = self._step.prompts.index(prompt)
            entry = slice(None) if others else slice(place * rows, (place + 1) * rows)
            yield (prompt, *(x[entry] for x in qkv))

    def _add(
        self, row: int, q: Tensor, k: Tensor, v: Tensor, call: Call, count: int,
        with_truth: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Measures so many query blocks, other ones than before, spread evenly. Returns the compared
        tokens (S, rows) and, where asked for, the exact output (B, H, S, rows, D) there."""
        first = self._draw + self._seen[row] + row  # neighbouring layers look at other ones
        blocks = [self._blocks[i] for i in spread_places(len(self._blocks), first, count)]
        if self._sums is None:
            self._sums = Sums(self.shape.rows, self.shape.heads, self.candidates)
        order = self._orders[0]
        asked = MeasuredCall(q, k, v, call.softmax_scale, order, self.candidates, blocks)
        found = measure(asked, with_truth)
        self._sums.add(row, found, len(blocks))
        self._seen[row] += len(blocks)
        return asked.tokens, found.norm if found.truth is None else found.truth

    def _look(self, row: int, dense: Tensor) -> None:
        """Remembers whether NaN or inf stand in a dense result, whose fault it then is not."""
        if self._extremes is None:
            self._extremes = torch.zeros(self.shape.rows, dtype=torch.float32, device=self.device)
        largest = torch.stack(torch.aminmax(dense)).abs().max().float()
        self._extremes[row] = torch.maximum(self._extremes[row], largest)

    def _choose(self, index: int) -> None:
        """Chooses for the steps from this one to the next choice, from what was measured so far.
        Waits for the device once."""
        known = self._known if self._sums is None else self._sums.or_else(self._known)
        assert known is not None
        following, left = self._next, self._left
        if index >= following:
            following, left = next_choice(index, self._steps, left) or NEVER, max(0, left - 1)
        curves = Curves.of(known, self.candidates)
        if self.aim.kind == "quality":
            chosen = curves.chosen(error=self.aim.value)
        else:
            of_steps = budgets(self.aim.value, self._steps or 1, self.least)
            end = min(following, len(of_steps))
            chosen = curves.chosen(of_steps[index:end] or of_steps[-1:])
        settings = curves.settings(chosen)
        means = settings.kept.mean(2)
        extremes = torch.zeros_like(means[0]) if self._extremes is None else self._extremes
        told = torch.cat([means, curves.known[None].float(), extremes[None]]).tolist()
        *self._kept, finite, largest = told
        for row, (is_finite, extreme) in enumerate(zip(finite, largest, strict=True)):
            if known.blocks[row] and not (is_finite and math.isfinite(extreme)):
                reason = INF_OF_MODEL if extreme == math.inf else NAN_OF_MODEL
                self._refusals.setdefault(row, reason)
        # From here on nothing waits, so that an interrupted choice is made in the next step.
        self.settings, self._known, self._sums = settings, known, None
        self._chosen_at, self._next, self._left = index, following, left
        self._is_new = False
        self._measured.clear()

    def _begin_step(self, index: int) -> None:
        """Takes the settings of a step."""
        assert self.settings is not None
        self._index = index
        of = min(index - self._chosen_at, len(self.settings.density) - 1)
        if not self.given or self.given[-1] != (self.settings, of):
            self._now = self.settings.of_step(of, self.policy, self.candidates.orders)
        self.given.append((self.settings, of))

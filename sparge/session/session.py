# SPDX-License-Identifier: Apache-2.0
"""One sampling run: heads are measured in the last dense step; in later steps each keeps as few key
blocks as a target for their mean error allows, or they share out a mean density. Without an aim
nothing is measured, and all heads follow one policy.

    session = Session.of(Aim("budget", 0.2), steps=20, dense_steps=4)
    layout = TokenLayout.of(layers=30, grid=TokenGrid(frames=21, height=34, width=30))
    for step in range(20):
        running = session.begin_step(step, layout, device)
        x = denoise(x, step, attention=running.attend)  # attend(layer, q, k, v) in each layer
        running.end()
    print(session.report())

Frameworks that split a step into passes of their own begin a `Pass` for each.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..checks.argument import check_kind, whole_number
from ..checks.validate import check_inference
from ..compiling import untraced
from ..errors import KernelBuildError, Unsupported
from ..failures import MEANT_FOR_HOST, Failures
from ..head_settings import HeadSettings
from ..kernels import capabilities
from ..kernels.warmup import KERNEL_DID_NOT_COMPILE, Needs, warm_up
from ..order.grid import TokenOrder
from ..policy import SparsePolicy
from ..reasons import Reason
from ..sdpa import BY_RULE, Rule, RuleOptions, options_of
from .calls import (
    CROSS_ATTENTION,
    MASK,
    Call,
    Decision,
    Dense,
    DenseOnce,
    Kind,
    ReadMasks,
    RealTokens,
    Untracked,
)
from .heads import FAILED, Place, RunHeads, Shape, SparseTerms, unmeasured
from .report import NAN_IN_SPARSE, NO_CALLS, Counts, Densities, PassRecord, Report, RunTime
from .schedule import EVERYTHING, MANUAL, Aim, Settings, SigmaWindow, Step, fitted
from .timing import TORCH, Backend, Exact, Times, check_once, times_of, unusable_reason
from .tokens import Layer, TokenLayout

logger = logging.getLogger("sparge")

LISTED = Reason("listed in dense_blocks", "listed")


class Session:
    """One sampling run, shared by its passes on every device. They may begin in several threads."""

    no_calls = NO_CALLS
    """Why no attention call came, in this framework."""

    def __init__(
        self,
        settings: Settings,
        window: SigmaWindow = EVERYTHING,
        schedule: Sequence[float] = (),
        *,
        aim: Aim | None = None,
        exact: Exact = TORCH,
        untracked: Untracked = nullcontext,
        draw: int = 0,
    ) -> None:
        """Heads are measured in the last dense step, or in the first step where there is none.

        Args:
            window, schedule: noise levels that may be sparse, and of each step, where known.
            aim: in place of the settings' own.
            exact: what serves the framework's exact calls.
            untracked: context around allocations that outlive a call, for frameworks that record
                those of a pass.
            draw: other query blocks are measured for another one.
        """
        self.settings, self.window, self.schedule = settings, window, schedule
        self.aim = aim or settings.aim
        self.asked = settings.policy()
        """Policy for any device; `fitted` makes it one's own."""
        self.rule: Rule | None = None
        """Rule of the caller, which is asked about each call that may be sparse; without an aim."""
        self.exact, self.untracked = exact, untracked
        self.counts, self.failures = Counts(), Failures()
        self.exact_dense = settings.exact_dense or self.aim is None
        self.even_if_slower = False
        """Whether nothing is timed, and no call is dense for being slower, on a CPU neither."""
        self._notes: dict[Reason, None] = {}
        # Not a method: whoever holds it holds no run, whose heads would stay on their devices until
        # the cycle is found.
        self.note: Callable[[Reason], None] = self._notes.setdefault
        """Adds a remark to the report, once."""
        self._dense_steps = 0
        self._sparse_steps: int | None = None
        self.heads = None if self.aim is None else RunHeads(self.aim, untracked, draw)
        """Heads of all calls; None where they all follow one policy."""
        self._records: list[PassRecord] = []  # of passes, which hold the run
        self._unusable: dict[torch.device, Reason] = {}
        self._began: float | None = None
        self._ended: float | None = None
        self._rows = 0  # most that a pass had
        self._lock = threading.RLock()

    @classmethod
    def of(
        cls,
        aim: Aim | None,
        *,
        steps: int | None = None,
        dense_steps: int = 1,
        policy: SparsePolicy | None = None,
        exact_dense: bool = False,
        even_if_slower: bool = False,
        draw: int = 0,
    ) -> Session:
        """Session of a loop over sampling steps (`begin_step`).

        Args:
            aim: a target for the mean error of heads, or a mean density over heads and steps; None
                for heads that all follow the policy.
            steps: number of sampling steps; None where it is not known.
            dense_steps: number of dense steps before the sparse ones; with 0 the first step is
                dense all the same, and measured.
            exact_dense: dense calls are exact also where 8 bits are faster.
            even_if_slower: calls are sparse, and measured, also where dense ones would be faster,
                and on a CPU, by the reference.
            draw: as of the constructor.
        """
        if aim is not None:
            check_kind("aim", aim, Aim, 'one such as Aim("budget", 0.5)')
        settings = Settings(mode=MANUAL, min_tokens=0, exact_dense=exact_dense)
        session = cls(settings, aim=aim, draw=draw)
        session.asked = SparsePolicy() if policy is None else policy
        check_kind("policy", session.asked, SparsePolicy, "a SparsePolicy, or None")
        session.even_if_slower = even_if_slower
        session._dense_steps = whole_number("dense_steps", dense_steps, 0)
        if steps is not None:
            session._sparse_steps = max(0, whole_number("steps", steps, 0) - dense_steps)
        return session

    def begin_step(
        self,
        step: int,
        layout: TokenLayout,
        device: torch.device | str,
        *,
        prompts: tuple[int, ...] = (0,),
    ) -> Pass:
        """Begins a sampling step, or one of its passes where prompts are computed one by one. Waits
        for the device where heads are chosen.

        step: its number from 0. prompts: number of the prompt of each entry of the batch.
        """
        check_kind("layout", layout, TokenLayout, "what TokenLayout.of makes")
        device = torch.empty(0, device=device).device  # with an index, as tensors have it
        dense, sparse = self._dense_steps, self._sparse_steps
        why_dense = None if step >= dense else Reason(f"one of the first {dense} steps")
        index = None if sparse is None else min(max(0, step - dense), max(0, sparse - 1))
        found = Step(prompts, step, why_dense, step == dense - 1, index, sparse)
        return Pass(session=self, layout=layout, step=found, device=device)

    def meet(self, begun: Pass) -> Reason | None:
        """Takes note of a pass that begins. Returns the reason why no call on its device can be
        sparse, if there is one. The clock starts at the first pass: kernels and model are there."""
        layout, device = begun.layout, begun.device
        self.counts.begin_pass(layout.family, layout.grid)
        self._began = self._began or time.perf_counter()
        if remark := self.settings.dense_layers.remark(layout.blocks):
            self.note(remark)
        unusable = self.unusable(device) or begun.unusable
        with self._lock:
            before = self._records[-1] if self._records else None
            self._records.append(begun.record)
            self._rows = max(self._rows, layout.rows, before.rows if before else 0)
        begun.record.looked_at = before.last_row if before else None
        if unusable is None and begun.step.why_dense is None:
            begun.record.expect(self._rows)
        return unusable

    def await_kernels(
        self,
        device: torch.device,
        needs: Needs,
        show: Callable[[str], None],
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for the kernels that a model needs, so that whether a call is sparse never depends
        on how fast a compiler was, and tests them where this GPU has not. show: shows a line while
        they compile."""
        if not capabilities(device).usable:
            return
        failure = warm_up(device, show, needs).wait(check_cancelled)
        if failure is not None:
            self.give_up(device, failure)
            return
        with self.failures.caught("the kernels were not tested on this GPU"):
            try:
                check_once(device, self.exact, needs)
            except Unsupported as error:
                self.give_up(device, Reason(*error.args))

    def unusable(self, device: torch.device) -> Reason | None:
        """Reason why attention on this device stays dense for the whole run, or None."""
        known = self._unusable.get(device)
        return known if known or self.even_if_slower else unusable_reason(device)

    def give_up(self, device: torch.device, reason: Reason) -> None:
        """Keeps the rest of the run dense on this device."""
        self._unusable.setdefault(device, reason)

    def stop_clock(self) -> None:
        """Stops the clock, where it is known that no pass is to come, or later than it is."""
        self._ended = time.perf_counter()

    def report(self, stopped: bool = False) -> Report:
        """Report of the passes so far. Waits for the devices."""
        records = self._records
        notes = [NAN_IN_SPARSE] if any(record.has_nan for record in records) else []
        ended = self._ended or time.perf_counter()
        return Report(
            self.counts,
            self.aim,
            Densities.of(records),
            () if self.heads is None else self.heads.report(),
            RunTime.of(records),
            self.no_calls,
            stopped,
            (*notes, *self._notes),
            len(self.schedule),
            0.0 if self._began is None else ended - self._began,
        )


@dataclass(kw_only=True, eq=False)
class Pass:
    """One forward pass on one device. Making it begins it, and waits for the device where heads are
    chosen: make it before the pass, never inside a call."""

    session: Session
    layout: TokenLayout
    step: Step
    device: torch.device
    unusable: Reason | None = None
    """Reason why no call of it can be sparse."""
    handing_on: bool = field(default=False, init=False, repr=False)
    """Whether the framework's dense path is running, whose own calls go straight on."""

    def __post_init__(self) -> None:
        session, settings = self.session, self.session.settings
        self.policy = fitted(session.asked, self.device)
        """As this device runs it, such as without the PV filter on Hopper."""
        self.record = PassRecord(self.step.number, self.device, session.untracked)
        self.unusable = session.meet(self)
        self._place: Place = (self.device, self.step.model)
        self._masks = ReadMasks(self.layout.tokens)
        self._dense_layers = settings.dense_layers.of_total(self.layout.blocks)
        self._filter_left_out = session.asked.pv_filter and not self.policy.pv_filter
        self._decisions: dict[Hashable, Decision] = {}
        self._times: dict[Decision, Times | None] = {}
        self._terms: dict[Decision, SparseTerms] = {}
        if self.unusable is None and session.heads is not None:
            session.heads.begin_pass(self._place, self.step)

    @property
    def _may_measure(self) -> bool:
        return self.step.why_dense is None or self.step.is_last_dense

    def end(self) -> None:
        """Ends the pass, which is queued; the GPU may still be computing it."""
        may_be_sparse = self.unusable is None and self.step.why_dense is None
        self.session.counts.end_pass(may_be_sparse or self.unusable is not None)

    @untraced
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layout: str = "HND",
        scale: float | None = None,
        exact: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Self-attention of a layer: sparse where its heads are chosen, else dense, and measured.

        q, k, v and the result are (B, H, N, D) for layout "HND", (B, N, H, D) for "NHD". exact
        gives the result of exact attention in that layout; `scaled_dot_product_attention` without
        it.

        Raises:
            ValueError: an argument is none of these, or the batch is not of the pass's prompts.
        """
        layer = whole_number("layer", layer, 0)
        call = Call.of(q, k, v, layout, scale)
        entries, prompts = call.q.shape[0], len(self.step.prompts)
        if entries % prompts:
            raise ValueError(
                f"prompts names {prompts} prompts and the batch has {entries} entries; give one "
                f"number for each entry, say {tuple(range(entries))}."
            )
        decision, why = self.decision(call, in_loop=True), None
        place = Layer(layer, layer, beside=layer >= self.layout.rows)
        if place.beside and decision.why_exact is None:
            why = Reason(f"the model has fewer layers than {layer + 1}")
        self.session.counts.reached = True
        why = why or self._why_dense(decision, place)
        return self._serve(call, decision, place, exact or call.exact, why, None)

    def decision(self, call: Call, in_loop: bool = False) -> Decision:
        """Decision on a call, made for the first of those that look the same. in_loop: it is of a
        loop over sampling steps, not of a framework."""
        key = call.look
        found = self._decisions.get(key)
        if found is None and in_loop:
            found = self._decisions[key] = Decision.in_loop(call, self.layout)
        elif found is None:
            found = Decision(Kind.CROSS, FAILED, call.query_tokens, False, (0, 0), ())
            with self.session.failures.caught("a call was computed dense"):
                found = Decision.of(call, self.layout, self.session.settings)
            self._decisions[key] = found
        return found

    def serve(
        self,
        call: Call,
        decision: Decision,
        layer: Layer,
        dense: Dense,
        why: Reason | None = None,
        held: Reason | None = None,
    ) -> Tensor:
        """Result of a call, sparse when nothing speaks against it, else from dense().

        why: a framework's reason to be dense. held: the same, of a call that may be measured.
        """
        if decision.is_of_clip:
            self.session.counts.reached = True
        why = self._why_dense(decision, layer) or why
        if call.mask is None or why is not None:
            return self._serve(call, decision, layer, dense, why, held)
        real = self._real_tokens(call, decision)
        if not isinstance(real, RealTokens):
            return self._serve(call, decision, layer, dense, real, held)
        outs = list[Tensor]()

        def of_real_ones() -> Tensor:
            outs.append(dense())
            return real.rows(call, outs[0])

        inner = real.call(call)
        decision = self.decision(inner)
        why = self._why_dense(decision, layer)
        out = self._serve(inner, decision, layer, of_real_ones, why, held, padded=True)
        return outs[0] if outs else real.whole(call, inner, out)

    def _serve(
        self,
        call: Call,
        decision: Decision,
        layer: Layer,
        dense: Dense,
        why: Reason | None,
        held: Reason | None,
        padded: bool = False,
    ) -> Tensor:
        """Result of a call, which is counted. why, held: as in `serve`. padded: whether dense()
        computes padding, too, so that its time is not the call's."""
        session, once, ruled = self.session, None, None
        if why is None and session.rule is not None:  # its errors are the caller's
            ruled = options_of(session.rule, call.as_torchs(layer.number, self.layout))
            why = Reason(BY_RULE, "own") if ruled is None else None
        try:
            if why is None:
                if call.q.device != self.device:
                    sentence = f"tensors on {call.q.device} in a pass on {self.device}"
                    raise Unsupported(sentence, "two devices")
                terms = self._terms.get(decision) or self._terms_of(call, decision)
                settings = self._settings(terms, layer.row, held)
                if not isinstance(settings, Reason):
                    out = self._sparse(call, terms, layer.row, settings, ruled)
                    for remark in decision.remarks:
                        session.note(remark)
                    session.counts.add_sparse(decision.tokens, self._filter_left_out)
                    return out
                why = settings
                if terms.heads is not None:
                    once = self._dense(call, decision, layer, dense, padded)
                    check_inference(*call.qkv)
                    timed = partial(self.record.timed, Backend.MEASURING, call)
                    terms.heads.measure(layer.row, call, terms.times, once.result, timed)
                    why = self.step.why_dense or terms.heads.refusal(layer.row) or why
        except Unsupported as refusal:
            if once is not None and refusal is once.failure:
                raise
            why = Reason(*refusal.args)
        except KernelBuildError as error:
            if decision.raises:
                raise
            logger.error("[Sparge] %s", error)
            why = self.unusable = KERNEL_DID_NOT_COMPILE
            session.give_up(self.device, why)
        except MEANT_FOR_HOST:
            raise
        except Exception as error:
            if decision.raises or ruled or (once is not None and error is once.failure):
                raise
            session.failures.tell("a call was computed dense", error)
            why = FAILED
        once = once or self._dense(call, decision, layer, dense, padded)
        result = once.result()
        if why == CROSS_ATTENTION:
            session.counts.add_cross()
        else:
            of_layer = decision.is_of_clip and not layer.beside
            self.record.add_dense(layer.row if of_layer else None, call.pairs)
            session.counts.add_dense(why, decision.tokens, once.by_eight_bit)
        return result

    def _dense(
        self, call: Call, decision: Decision, layer: Layer, dense: Dense, padded: bool
    ) -> DenseOnce:
        """Dense result of a call, which measuring takes, too."""
        timed = decision.kind is Kind.SELF and not padded
        is_told = timed and self.unusable is None

        def exact() -> Tensor:
            with self.record.timed(Backend.EXACT, call) if is_told else nullcontext():
                return self._hand_on(dense)

        def eight_bit() -> Tensor | None:
            if (self.unusable or decision.why_exact) is not None:
                return None
            caught = self.session.failures.caught("a dense call was computed exact")
            with nullcontext() if decision.raises else caught:
                return self._eight_bit(call, decision, layer.row if timed else None)
            return None

        return DenseOnce(exact, eight_bit)

    def _why_dense(self, decision: Decision, layer: Layer) -> Reason | None:
        """Reason why a call is dense whatever its heads are like, or None. What no widget can
        change is the first."""
        of_machine = None if decision.kind is Kind.CROSS else self.unusable
        reason = of_machine or decision.why_exact
        if reason is None and self.session.aim is None:
            reason = self.step.why_dense  # with an aim a call of a dense pass may be measured
        if reason is None and self._dense_layers:
            listed = any(layer.number in span for span in self._dense_layers)
            reason = LISTED if listed else None
        return reason

    def _real_tokens(self, call: Call, decision: Decision) -> RealTokens | Reason | None:
        """Real tokens of a call whose mask may be padding; None for others, or for a reason that
        needs no look at it. May wait, as `ReadMasks` says, where a pass may be sparse or measured.
        """
        if call.key_mask is None or decision.kind is not Kind.SELF:
            return None
        if self.layout.ranks > 1:
            return MASK  # real tokens are not the first of those that were dealt
        if self.step.why_dense is not None and not self.step.is_last_dense:
            return self.step.why_dense
        return self._masks.real_tokens(call.key_mask)

    def _settings(
        self, terms: SparseTerms, row: int, held: Reason | None
    ) -> tuple[TokenOrder | None, HeadSettings | None] | Reason:
        """Token order and head settings of a sparse call of a layer, or the reason why it is
        dense."""
        why_dense = self.step.why_dense
        if terms.heads is None:
            return why_dense or terms.why_slower or held or (terms.order, None)
        found = terms.heads.of_layer(row, terms.times)
        if isinstance(found, Reason):
            return why_dense or found
        return why_dense or held or (terms.heads.order(self.step.number), found)

    def _sparse(
        self,
        call: Call,
        terms: SparseTerms,
        row: int,
        settings: tuple[TokenOrder | None, HeadSettings | None],
        ruled: RuleOptions | None,
    ) -> Tensor:
        """Sparse result of a call of a layer."""
        record, heads = self.record, terms.heads
        with record.timed(Backend.SPARSE, call, terms.foretold):
            out = call.sparse(terms.policy, record.stats_of(row), *settings, ruled)
        record.look(row, out)
        if heads is not None and heads.measures_again:
            with record.timed(Backend.MEASURING, call):
                heads.measure_again(row, call, out)
        return out

    def _terms_of(self, call: Call, decision: Decision) -> SparseTerms:
        """Terms of a call that may be sparse, and of those that look like it."""
        session, layout, tokens = self.session, self.layout, call.query_tokens
        grid = layout.sequence(tokens) if call.key_tokens == tokens else None
        prefix, suffix = decision.ends
        policy = replace(self.policy, exact_prefix=prefix, exact_suffix=suffix)
        shape = Shape(tokens, call.head_count, grid, layout.ranks, call.shares_keys)
        terms = SparseTerms(policy)
        if session.heads is not None and not self._may_measure:
            session.heads.saw(self._place, shape, self.step.prompts)
        elif session.heads is not None:
            with session.untracked():
                terms.heads = session.heads.of_shape(self._place, shape, self.policy)
                terms.heads.begin_pass(self.step)
        terms.times = times = self._times_of(call, decision)
        if times is not None and call.is_timed:
            terms.foretold = times.exact * call.q.shape[0]
        if session.heads is None and session.rule is None:  # nobody knows what a rule keeps
            terms.why_slower = times and times.why_policy_slower(policy)
        if session.heads is None and terms.why_slower is None and grid is not None:
            step = self.step.number
            with session.untracked():
                terms.order = unmeasured(grid, layout.ranks, step, self.device)
        self._terms[decision] = terms
        return terms

    def _times_of(self, call: Call, decision: Decision) -> Times | None:
        """Seconds of calls like this one by each backend, where they are known or can be."""
        if self.session.even_if_slower:
            return None
        if decision not in self._times:
            session, grid, times = self.session, self.layout.sequence(call.query_tokens), None
            with session.untracked(), session.failures.caught("attention was not timed"):
                times = times_of(call, session.exact, grid)
            if times is not None and (session.exact_dense or not call.is_timed):
                times = replace(times, eight_bit=math.inf)
            self._times[decision] = times
        return self._times[decision]

    def _eight_bit(self, call: Call, decision: Decision, row: int | None) -> Tensor | None:
        """Result of a dense call of a layer in 8 bits; None where it has to be exact. row: None
        where its exact call would not be timed."""
        if call.q.device != self.device or self.session.exact_dense or not call.is_timed:
            return None
        times = self._times_of(call, decision)
        if times is None or not times.is_eight_bit:
            return None
        if self.record.learns_exact_time(row, call):
            return None
        foretold = times.exact * call.q.shape[0]
        # Exact attention may need less memory.
        with (
            suppress(Unsupported, torch.OutOfMemoryError),
            self.record.timed(Backend.EIGHT_BIT, call, foretold),
        ):
            return call.eight_bit()
        return None

    def _hand_on(self, dense: Dense) -> Tensor:
        """Runs the dense path. Should it lead back here, that inner call goes straight on."""
        self.handing_on = True
        try:
            return dense()
        finally:
            self.handing_on = False

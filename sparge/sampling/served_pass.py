# SPDX-License-Identifier: Apache-2.0
"""One forward pass of a model, which serves its attention calls. What holds for all of them is
worked out once, so that no call waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from ..common.failures import MEANT_FOR_HOST
from ..errors import KernelBuildError, Unsupported
from ..kernels.warmup import KERNEL_DID_NOT_COMPILE
from ..tune import FAILED, MASK, Call, DenseOnce, RealTokens, SessionPass, real_tokens
from .decision import CROSS_ATTENTION, CallFacts, Decision, GivenCall, Kind
from .layout import Layer, TokenLayout
from .run import Run

logger = logging.getLogger("sparge")

Dense = Callable[[], Tensor]


@dataclass(kw_only=True)
class ServedPass:
    """One forward pass; its host finds the layer of each call."""

    run: Run
    layout: TokenLayout
    begun: SessionPass
    unusable: str | None
    """Reason why no call on this device can be sparse."""
    beside: frozenset[int] = frozenset()
    """Numbers of tokens of what is sampled beside the clip (sound), alone."""
    handing_on: bool = field(default=False, init=False, repr=False)
    """Whether the host's dense path is running, whose own calls go straight on."""
    _decisions: dict[CallFacts, Decision] = field(default_factory=dict, init=False, repr=False)
    _real: dict[int, tuple[Tensor, RealTokens | str | None]] = field(
        default_factory=dict, init=False, repr=False
    )
    """Real tokens by the id of a mask, with the mask itself: what has an id must live."""

    def __post_init__(self) -> None:
        settings = self.run.settings
        self._dense_layers = settings.dense_layers.of_total(self.layout.blocks)
        # With an aim a call of a dense pass may be measured.
        self._why_dense_pass = self.begun.facts.why_dense if settings.aim is None else None
        self._filter_left_out = self.run.asked.pv_filter and not self.begun.policy.pv_filter

    def end(self) -> None:
        """Ends the pass for the host, which has queued it; the GPU may still be computing it."""
        may_be_sparse = self.unusable is None and self.begun.facts.why_dense is None
        self.run.tally.end_forward(may_be_sparse or self.unusable is not None)
        self.begun.end()

    def decision(self, given: GivenCall) -> Decision:
        """Decision on a call, made for the first of those that show the same."""
        found = self._decisions.get(given.facts)
        if found is None:
            found = Decision(Kind.CROSS, FAILED, given.facts.query_tokens, False, (0, 0), ())
            with self.run.failures.caught("a call was computed dense"):
                found = Decision.of(given.facts, self.layout, self.run.settings, self.beside)
            self._decisions[given.facts] = found
        return found

    def serve(self, given: GivenCall, decision: Decision, layer: Layer, dense: Dense) -> Tensor:
        """Result of a call, sparse when nothing speaks against it, else from dense()."""
        if decision.is_of_clip:
            self.run.tally.reached = True
        real = None if given.mask is None else self._real_tokens(given, decision, layer)
        if not isinstance(real, RealTokens):
            return self._serve(given, decision, layer, dense, why=real)
        return self._among_real(real, given, layer, dense)

    def _among_real(self, real: RealTokens, given: GivenCall, layer: Layer, dense: Dense) -> Tensor:
        """Result of a call with padding."""
        call, outs = given.tensors, []
        assert isinstance(call, Call)

        def of_real_ones() -> Tensor:
            outs.append(dense())
            return real.rows(call, outs[0])

        inner = real.call(call)
        given = given.of_tensors(inner)
        out = self._serve(given, self.decision(given), layer, of_real_ones, padded=True)
        return outs[0] if outs else real.whole(call, inner, out)

    def _serve(
        self,
        given: GivenCall,
        decision: Decision,
        layer: Layer,
        dense: Dense,
        why: str | None = None,
        padded: bool = False,
    ) -> Tensor:
        """Computes a call. why: reason to be dense, beside what is looked at here. padded: dense()
        computes more than the call's tokens, so its time says nothing of them."""
        # Measuring takes the dense result, too.
        timed = decision.kind is Kind.SELF and not padded
        row = layer.row if timed else None
        once = DenseOnce(
            partial(self._exact, given, timed, dense),
            partial(self._eight_bit, given, decision, row),
        )
        try:
            out = why or self._sparse(given, decision, layer, once)
            if not isinstance(out, str):
                return out
            reason = out
        except Unsupported as refusal:
            reason = refusal.reason
        except KernelBuildError as error:
            logger.error("[Sparge] %s", error)
            reason = self.unusable = KERNEL_DID_NOT_COMPILE
            self.run.give_up(self.begun.device, reason)
        except MEANT_FOR_HOST:
            raise
        except Exception as error:
            if error is once.failure:
                raise
            self.run.failures.tell("a call was computed dense", error)
            reason = FAILED
        result = once.result()
        if reason == CROSS_ATTENTION:
            self.run.tally.add_cross()
            return result
        of_layer = decision.is_of_clip and not layer.beside
        self.begun.record.add_dense(layer.row if of_layer else None, given.facts.pairs)
        self.run.tally.add_dense(reason, decision.tokens, once.by_eight_bit)
        return result

    def _eight_bit(self, given: GivenCall, decision: Decision, row: int | None) -> Tensor | None:
        """Result by 8-bit dense attention; None where the call has to be exact. row: as in
        `SessionPass.eight_bit`."""
        exact = self.unusable or decision.why_exact
        if exact is not None or given.mask is not None or not isinstance(given.tensors, Call):
            return None
        with self.run.failures.caught("a dense call was computed exact"):
            return self.begun.eight_bit(given.tensors, row)
        return None

    def _sparse(
        self, given: GivenCall, decision: Decision, layer: Layer, dense: DenseOnce
    ) -> Tensor | str:
        """Sparse result of a call, or the reason why it is dense."""
        reason = self._why_dense(given, decision, layer)
        if reason is not None:
            return reason
        assert isinstance(given.tensors, Call)
        out = self.begun.sparse(given.tensors, layer.row, dense, decision.ends)
        if isinstance(out, str):
            return out
        for remark in decision.remarks:
            self.run.note(remark)
        self.run.tally.add_sparse(decision.tokens, self._filter_left_out)
        return out

    def _why_dense(self, given: GivenCall, decision: Decision, layer: Layer) -> str | None:
        """Reason why a call is dense whatever its heads are like, or None."""
        reason, device = decision.why_exact or self.unusable, self.begun.device
        if reason is None and given.q.device != device:
            reason = f"tensors on {given.q.device} in a forward pass on {device}"
        reason = reason or self._why_dense_pass
        if reason is None and any(layer.number in span for span in self._dense_layers):
            reason = "listed in dense_blocks"
        return reason or (given.tensors if isinstance(given.tensors, str) else None)

    def _real_tokens(
        self, given: GivenCall, decision: Decision, layer: Layer
    ) -> RealTokens | str | None:
        """Real tokens of a call whose mask may be padding; None for others, or for a reason that
        needs no look at it. Waits once a mask, where a pass may be sparse or measured."""
        mask, row, of_pass = given.mask, given.key_mask, self.begun.facts
        if mask is None or row is None or decision.kind is not Kind.SELF:
            return None
        if self.layout.ranks > 1:
            return MASK  # real tokens are not the first of those that were dealt
        if self._why_dense(given, decision, layer) is not None:
            return None
        if of_pass.why_dense is not None and not of_pass.is_last_dense:
            return of_pass.why_dense
        if id(mask) not in self._real:
            self._real[id(mask)] = mask, real_tokens(row, self.layout.tokens)
        return self._real[id(mask)][1]

    def _exact(self, given: GivenCall, timed: bool, dense: Dense) -> Tensor:
        compute, call = partial(self._hand_on, dense), given.tensors
        if not timed or self.unusable is not None or not isinstance(call, Call):
            return compute()
        return self.begun.exact(call, compute)

    def _hand_on(self, dense: Dense) -> Tensor:
        """Runs the dense path. Should it lead back here, that inner call goes straight on."""
        self.handing_on = True
        try:
            return dense()
        finally:
            self.handing_on = False

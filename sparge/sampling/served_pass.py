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
from .decision import CROSS_ATTENTION, Kind, dense_reason, exact_reason
from .given_call import GivenCall
from .layout import Layer, TokenLayout
from .run import Run

logger = logging.getLogger("sparge")

#: Remark on sparse calls of a known model whose tokens are not those of its clip.
UNKNOWN_TOKENS = (
    "some calls have other tokens than the clip and its text (an image of another size?): those "
    "stay in the order they come, which errs more"
)
#: Remark on such calls of a model that several GPUs share.
TEXT_NOT_EXACT = "several GPUs share the model, and text was not exact: nobody says where it stands"
#: Remark on sparse calls of some of the queries.
FRAME_BY_FRAME = "the model attends frame by frame: those calls keep their tokens as they come"

Dense = Callable[[], Tensor]


@dataclass(kw_only=True)
class ServedPass:
    """One forward pass; its host finds the kind and the layer of each call."""

    run: Run
    layout: TokenLayout
    begun: SessionPass
    unusable: str | None
    """Reason why no call on this device can be sparse."""
    beside: frozenset[int] = frozenset()
    """Numbers of tokens of what is sampled beside the clip (sound), alone."""
    _handing_on: bool = field(default=False, repr=False)
    _real: dict[int, tuple[Tensor, RealTokens | str | None]] = field(
        default_factory=dict, repr=False
    )
    """Real tokens by the id of a mask, with the mask itself: what has an id must live."""

    @property
    def _may_be_sparse(self) -> bool:
        return self.unusable is None and self.begun.facts.why_dense is None

    def end(self) -> None:
        """Ends the pass for the host, which has queued it; the GPU may still be computing it."""
        self.run.tally.end_forward(self._may_be_sparse or self.unusable is not None)
        self.begun.end()

    @property
    def handing_on(self) -> bool:
        """Whether the host's dense path is running, whose own calls go straight on."""
        return self._handing_on

    def serve(self, given: GivenCall, kind: Kind, layer: Layer, dense: Dense) -> Tensor:
        """Result of a call, sparse when nothing speaks against it, else from dense()."""
        if self._is_of_clip(given, kind):
            self.run.tally.reach()
        real = self._real_tokens(given, kind, layer)
        if not isinstance(real, RealTokens):
            return self._serve(given, kind, layer, dense, why=real)
        return self._among_real(real, given, kind, layer, dense)

    def _among_real(
        self, real: RealTokens, given: GivenCall, kind: Kind, layer: Layer, dense: Dense
    ) -> Tensor:
        """Result of a call with padding."""
        call, outs = given.tensors, []
        assert isinstance(call, Call)

        def of_real_ones() -> Tensor:
            outs.append(dense())
            return real.rows(call, outs[0])

        inner = real.call(call)
        out = self._serve(given.of_tensors(inner), kind, layer, of_real_ones, padded=True)
        return outs[0] if outs else real.whole(call, inner, out)

    def _serve(
        self,
        given: GivenCall,
        kind: Kind,
        layer: Layer,
        dense: Dense,
        why: str | None = None,
        padded: bool = False,
    ) -> Tensor:
        """Computes a call. why: reason to be dense, beside what is looked at here. padded: dense()
        computes more than the call's tokens, so its time says nothing of them."""
        # Measuring takes the dense result, too.
        timed = kind is Kind.SELF and not padded
        once = DenseOnce(partial(self._exact, given, timed, dense), partial(self._eight_bit, given))
        try:
            out = why or self._sparse(given, kind, layer, once)
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
        if kind is not Kind.CROSS and not layer.beside:
            self.begun.record.dense.add(layer.row)
        result = once.result()
        if reason != CROSS_ATTENTION:
            self.run.tally.add_dense(reason, self._tokens(given, kind), once.by_eight_bit)
        else:
            self.run.tally.add_cross()
        return result

    def _eight_bit(self, given: GivenCall) -> Tensor | None:
        """Result by 8-bit dense attention; None where the call has to be exact."""
        if self.unusable is not None or given.mask is not None:
            return None
        if exact_reason(given.facts, self.layout, self.run.settings) is not None:
            return None
        with self.run.failures.caught("a dense call was computed exact"):
            return self.begun.eight_bit(given.tensors) if isinstance(given.tensors, Call) else None
        return None

    def _sparse(self, given: GivenCall, kind: Kind, layer: Layer, dense: DenseOnce) -> Tensor | str:
        """Sparse result of a call, or the reason why it is dense."""
        reason = self._why_dense(given, layer)
        if reason is not None:
            return reason
        assert isinstance(given.tensors, Call)
        whole, tokens = kind is Kind.SELF, given.facts.query_tokens
        ends = self.layout.exact_tokens(tokens, given.reference_tokens) if whole else (0, 0)
        if any(ends) and not self.layout.shared.alone and self.layout.sequence(tokens) is None:
            self.run.note(TEXT_NOT_EXACT)
            ends = (0, 0)
        out = self.begun.sparse(given.tensors, layer.row, dense, ends)
        if isinstance(out, str):
            return out
        if self.layout.remark:
            self.run.note(self.layout.remark)
        elif not whole:
            self.run.note(FRAME_BY_FRAME)
        elif self.layout.sequence(tokens) is None:
            self.run.note(UNKNOWN_TOKENS)
        left_out = self.run.asked.pv_filter and not self.begun.policy.pv_filter
        self.run.tally.add_sparse(self._tokens(given, kind), left_out)
        return out

    def _why_dense(self, given: GivenCall, layer: Layer) -> str | None:
        """Reason why a call is dense whatever its heads are like, or None."""
        settings, reason = self.run.settings, self.unusable
        if reason is None and given.q.device != self.begun.device:
            reason = f"tensors on {given.q.device} in a forward pass on {self.begun.device}"
        if reason is None and settings.aim is None:  # else a dense call is measured in that step
            reason = self.begun.facts.why_dense
        reason = dense_reason(given.facts, layer.number, reason, self.layout, settings)
        return reason or (given.tensors if isinstance(given.tensors, str) else None)

    def _tokens(self, given: GivenCall, kind: Kind) -> int:
        """Number of tokens of the sequence that a call is of."""
        facts = given.facts
        if kind is not Kind.PART:
            return facts.query_tokens
        return min(facts.key_tokens, self.layout.grid_tokens or facts.key_tokens)

    def _is_of_clip(self, given: GivenCall, kind: Kind) -> bool:
        """Whether a call is of the clip's self-attention or, as some models have it, a part of it:
        never one of text or sound alone, nor one in which the clip looks at those."""
        tokens, keys = given.facts.query_tokens, given.facts.key_tokens
        if tokens < self.layout.frame_tokens:
            return False
        if tokens in self.beside and tokens != self.layout.grid_tokens:
            return False
        return keys >= self.layout.grid_tokens or kind is Kind.SELF

    def _real_tokens(self, given: GivenCall, kind: Kind, layer: Layer) -> RealTokens | str | None:
        """Real tokens of a call whose mask may be padding; None without one, or for a reason that
        needs no look at it. Waits once a mask, where a pass may be sparse or measured."""
        mask, row, of_pass = given.mask, given.key_mask, self.begun.facts
        if mask is None or row is None or kind is not Kind.SELF:
            return None
        if not self.layout.shared.alone:
            return MASK  # real tokens are not the first of those that were dealt
        if self._why_dense(given, layer) is not None:
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
        self._handing_on = True
        try:
            return dense()
        finally:
            self._handing_on = False

# SPDX-License-Identifier: Apache-2.0
"""Facts that hold for one forward pass, worked out once before it: no sync per call."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..sparge import KernelBuildError, SparsePolicy, TokenOrder, Unsupported, capabilities
from ..sparge.speed.worth import density_with_exact
from ..sparge.tune import FAILED, PassFacts, PassRecord, Plan, SessionPass
from ..sparge.tune.worth import slower_reason
from .attention_call import AttentionCall, Dense
from .decision import CROSS_ATTENTION, CallFacts, Kind, dense_reason
from .exact_attention import ExactResult, by_faster_kernel
from .failures import MEANT_FOR_COMFYUI
from .families import FRAME_BY_FRAME, UNKNOWN_TOKENS, TokenLayout, token_layout
from .host import untracked_allocations
from .layer_counter import Layer, LayerCounter
from .pv_filter import fitted
from .real_tokens import RealTokens, real_tokens
from .run_state import Run
from .warmup import KERNEL_DID_NOT_COMPILE

logger = logging.getLogger("sparge")


@dataclass
class Forward:
    """One forward pass; lives in its own transformer_options, so threads never share it."""

    run: Run
    device: torch.device
    layout: TokenLayout
    policy: SparsePolicy
    """Policy as this device runs it, without the text."""
    unusable: str | None
    """Reason why no call on this device can be sparse."""
    outside: str | None
    """Reason why this step shall not be sparse."""
    orders: dict[int, TokenOrder]
    """Orders of manual mode, by number of tokens."""
    heads: SessionPass | None
    """In auto modes, where the device can be sparse."""
    record: PassRecord
    layers: LayerCounter
    beside: frozenset[int] = frozenset()
    """Numbers of tokens of what is sampled beside the clip (sound), alone."""
    _handing_on: bool = field(default=False, repr=False)
    _real: dict[int, tuple[Tensor, RealTokens | str | None]] = field(
        default_factory=dict, repr=False
    )
    """Real tokens by the id of a mask, with the mask itself: what has an id must live."""

    @classmethod
    def begin(
        cls,
        run: Run,
        diffusion_model: Any,
        x: Tensor,
        sigma: Tensor,
        context: Any,
        options: Mapping[str, Any],
        extras: Mapping[str, Any],
        which: int = 0,
    ) -> Forward:
        """Begins a pass. x is its latent and sigma its noise levels; which: as in `Run`; the rest
        are apply_model's."""
        packed = extras.get("latent_shapes")  # audio and video in one flat latent: video is first
        layout = token_layout(diffusion_model, packed[0] if packed else x.shape, context, extras)
        run.tally.add_forward(layout.family, layout.grid)
        spans = run.settings.dense_spans
        if layout.blocks is None and spans.needs_total:
            run.note("negative dense_blocks do nothing: this model's block count is unknown")
        if layout.blocks is not None and (missing := spans.missing(layout.blocks)):
            numbers = ", ".join(map(str, missing))
            run.note(f"dense_blocks names {numbers}; this model has blocks 0-{layout.blocks - 1}")
        unusable, outside, is_last_dense = run.unusable(x.device), None, False
        place = None
        if unusable is None and (slower_target := capabilities(x.device).note):
            run.note(slower_target)
        if unusable is None and run.needs_level:
            # The one place where a run waits for the GPU: once a pass, for a single number.
            level = float(sigma.max())
            outside = run.window.outside_reason(level, run.settings)
            is_last_dense = run.window.is_last_dense(level, run.schedule)
            place = run.window.place(level, run.schedule)
        conditioning = tuple(options.get("cond_or_uncond") or (0,))
        record = run.begin_pass(
            conditioning, layout.rows, x.device, unusable is None and outside is None
        )
        policy = fitted(run.asked, x.device)
        orders: dict[int, TokenOrder] = {}
        heads = None
        if unusable is None and run.heads is not None:
            facts = PassFacts(conditioning, record.step, outside, is_last_dense, place, which)
            heads = run.heads.begin_pass(layout, policy, x.device, facts)
        elif record.pairs is not None:
            for grid in layout.expected:
                orders[grid.tokens] = run.order(grid, record.step, x.device)
        return cls(
            run,
            x.device,
            layout,
            policy,
            unusable,
            outside,
            orders,
            heads,
            record,
            LayerCounter(layout),
            frozenset(shape[2] for shape in (packed or ())[1:]),
        )

    def end(self) -> None:
        """Ends the pass for the host, which has queued it; the GPU may still be computing it."""
        self.run.tally.end_forward(may_be_sparse=self.unusable is not None or self.outside is None)
        if self.heads is not None:
            self.heads.end()

    def attend(self, call: AttentionCall, dense: Dense) -> Tensor:
        """Result of a call, sparse when nothing speaks against it, else from dense()."""
        if self._handing_on:
            return dense()
        facts = call.facts
        options: Mapping[str, Any] = call.options.get("transformer_options") or {}
        kind = facts.kind(self.layout, self.run.settings)
        tokens = self._tokens(facts, kind)
        if kind is Kind.SELF or (kind is Kind.PART and self.layout.text is None):
            layer = self.layers.next(options, tokens)
        else:  # one of several calls in a layer
            layer = self.layers.peek(options)
        if self._is_of_clip(facts, kind):
            self.run.tally.reach()
        real = self._real_tokens(call, facts, kind, layer)
        if not isinstance(real, RealTokens):
            return self._serve(call, facts, kind, layer, dense, why=real)
        return self._among_real(real, call, kind, layer, dense)

    def _among_real(
        self, real: RealTokens, call: AttentionCall, kind: Kind, layer: Layer, dense: Dense
    ) -> Tensor:
        """Result of a call with padding."""
        given: list[Tensor] = []

        def of_real_ones() -> Tensor:
            given.append(dense())
            return real.rows(call, given[0])

        inner = real.call(call)
        out = self._serve(inner, inner.facts, kind, layer, of_real_ones)
        return given[0] if given else real.whole(call, inner, out)

    def _serve(
        self,
        call: AttentionCall,
        facts: CallFacts,
        kind: Kind,
        layer: Layer,
        dense: Dense,
        why: str | None = None,
    ) -> Tensor:
        """Computes a call. why: reason to be dense, beside what is looked at here."""
        tokens = self._tokens(facts, kind)
        exact = ExactResult(call, partial(self._hand_on, dense))  # measuring takes the result too
        try:
            plan = why or self._plan(call, facts, layer, exact)
            if not isinstance(plan, str):
                return self._sparse(call, tokens, kind, layer.row, plan)
            reason = plan
        except Unsupported as refusal:
            reason = refusal.reason
        except KernelBuildError as error:
            logger.error("[Sparge] %s", error)
            reason = self.unusable = KERNEL_DID_NOT_COMPILE
            self.run.give_up(self.device, reason)
        except MEANT_FOR_COMFYUI:
            raise
        except Exception as error:
            if error is exact.failure:
                raise
            self.run.failures.tell("a call was computed dense", error)
            reason = FAILED
        out = None
        if reason == CROSS_ATTENTION:
            out = self._cross(call)
        else:
            self.run.tally.add_dense(reason, tokens, exact.by_faster)
        if kind is not Kind.CROSS and not layer.beside:
            self.record.dense.add(layer.row)
        return exact.own() if out is None else out

    def _tokens(self, facts: CallFacts, kind: Kind) -> int:
        """Number of tokens of the sequence that a call is of."""
        if kind is not Kind.PART:
            return facts.query_tokens
        return min(facts.key_tokens, self.layout.grid_tokens or facts.key_tokens)

    def _is_of_clip(self, facts: CallFacts, kind: Kind) -> bool:
        """Whether a call is of the clip's self-attention or, as some models have it, a part of it:
        never one of text or sound alone, nor one in which the clip looks at those."""
        tokens, keys = facts.query_tokens, facts.key_tokens
        if tokens < self.layout.frame_tokens:
            return False
        if tokens in self.beside and tokens != self.layout.grid_tokens:
            return False
        return keys >= self.layout.grid_tokens or kind is Kind.SELF

    def _cross(self, call: AttentionCall) -> Tensor | None:
        """Result of cross-attention by a faster kernel than ComfyUI's, in passes that may be sparse
        and where one is known; else None."""
        out = None
        may_be = self.unusable is None and self.outside is None
        if may_be and not call.has_mask and call.odd_shapes is None:
            with self.run.failures.caught("a cross-attention call took ComfyUI's own kernel"):
                out = by_faster_kernel(call)
        self.run.tally.add_cross(by_faster_kernel=out is not None)
        return out

    def _why_dense(self, call: AttentionCall, facts: CallFacts, layer: Layer) -> str | None:
        """Reason why a call is dense whatever its heads are like, or None."""
        everywhere = self.unusable
        if everywhere is None and call.q.device != self.device:
            everywhere = f"tensors on {call.q.device} in a forward pass on {self.device}"
        step = self.outside if self.heads is None else None  # a dense call is measured in it
        of_run, settings = everywhere or step, self.run.settings
        reason = dense_reason(facts, layer.block, of_run, self.layout, settings)
        return reason or call.odd_shapes

    def _plan(
        self, call: AttentionCall, facts: CallFacts, layer: Layer, exact: ExactResult
    ) -> Plan | str | None:
        """Plan of a sparse call in auto modes, or the reason why it is dense; None in manual
        mode.
        """
        reason = self._why_dense(call, facts, layer)
        if reason is not None:
            return reason
        if self.heads is not None:
            return self.heads.plan(call, facts.query_tokens, layer.row, exact)
        return self._slower(call, facts)

    def _real_tokens(
        self, call: AttentionCall, facts: CallFacts, kind: Kind, layer: Layer
    ) -> RealTokens | str | None:
        """Real tokens of a call whose mask may be padding; None without one, or for a reason that
        needs no look at it. Waits once a mask, where a pass may be sparse or measured."""
        if call.key_mask is None or kind is not Kind.SELF:
            return None
        if self._why_dense(call, facts, layer) is not None:
            return None
        of_pass = self.heads.facts if self.heads is not None else None
        if of_pass is not None and of_pass.why_dense is not None and not of_pass.is_last_dense:
            return of_pass.why_dense
        key = id(call.key_mask)
        if key not in self._real:
            self._real[key] = call.key_mask, real_tokens(call.key_mask, self.layout)
        return self._real[key][1]

    def _slower(self, call: AttentionCall, facts: CallFacts) -> str | None:
        """Reason why a call of manual mode would be slower sparse, or None. What cdf keeps is not
        known."""
        if self.run.settings.select_by != "topk":
            return None
        text = sum(self._exact_tokens(call, facts.query_tokens)) / facts.query_tokens
        density = density_with_exact(self.run.settings.topk, text)
        return slower_reason(call, density, self.policy.pv_filter, pooled=None)

    def _exact_tokens(self, call: AttentionCall, tokens: int) -> tuple[int, int]:
        options: Mapping[str, Any] = call.options.get("transformer_options") or {}
        references = sum(options.get("reference_image_num_tokens") or ())
        return self.layout.exact_tokens(tokens, references)

    def _order(self, tokens: int) -> TokenOrder | None:
        """Token order of manual mode. One that was not expected is made inside a call."""
        if tokens not in self.orders and (grid := self.layout.sequence(tokens)) is not None:
            with untracked_allocations():
                self.orders[tokens] = self.run.order(grid, self.record.step, self.device)
        return self.orders.get(tokens)

    def _sparse(
        self, call: AttentionCall, tokens: int, kind: Kind, row: int, plan: Plan | None
    ) -> Tensor:
        whole = kind is Kind.SELF
        prefix, suffix = self._exact_tokens(call, tokens) if whole else (0, 0)
        policy = replace(self.policy, exact_prefix=prefix, exact_suffix=suffix)
        stats = self.record.stats_of(row)
        if plan is None or self.heads is None:
            order = self._order(tokens) if whole else None
            out = call.sparse(policy, stats, order)
        else:
            order = plan.order
            out = call.sparse(policy, stats, order, plan.head_settings)
            self.heads.probe(plan, row, call, out)
        if self.layout.remark:
            self.run.note(self.layout.remark)
        elif order is None:
            self.run.note(UNKNOWN_TOKENS if whole else FRAME_BY_FRAME)
        self.run.tally.add_sparse(
            tokens, filter_left_out=self.run.asked.pv_filter and not policy.pv_filter
        )
        return out

    def _hand_on(self, dense: Dense) -> Tensor:
        """Runs the dense path. Should it lead back here, that inner call goes straight on."""
        self._handing_on = True
        try:
            return dense()
        finally:
            self._handing_on = False

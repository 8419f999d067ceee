# SPDX-License-Identifier: Apache-2.0
"""What holds for one forward pass of the model, worked out once before it: no sync per call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..sparge import AttentionStats, KernelBuildError, Unsupported
from .attention_call import AttentionCall
from .decision import dense_reason
from .families import TokenLayout, token_layout
from .run_state import Run
from .warmup import KERNEL_DID_NOT_COMPILE

logger = logging.getLogger("sparge")

Dense = Callable[[], Tensor]


@dataclass
class Forward:
    """One forward pass; lives in its own transformer_options, so threads never share it."""

    run: Run
    device: torch.device
    layout: TokenLayout
    dense_because: str | None
    stats: AttentionStats | None
    self_attention_calls: int = 0
    _handing_on: bool = field(default=False, repr=False)

    @classmethod
    def begin(
        cls, run: Run, diffusion_model: Any, x: Tensor, sigma: Tensor, kwargs: Any
    ) -> Forward:
        """x is the latent of this pass and sigma its noise levels; kwargs are apply_model's."""
        packed = kwargs.get("latent_shapes")  # audio and video in one flat latent: video is first
        layout = token_layout(diffusion_model, packed[0] if packed else x.shape)
        run.tally.add_forward(layout.family)
        if layout.blocks is None and run.settings.dense_spans.needs_total:
            run.note("negative dense_blocks do nothing: this model's block count is unknown")
        reason = run.unusable(x.device)
        if reason is None and not run.window.is_everything:
            # The one place where a run waits for the GPU: once a pass, for a single number.
            reason = run.window.outside_reason(float(sigma.max()), run.settings)
        stats = run.stats(x.device) if reason is None else None
        return cls(run, x.device, layout, reason, stats)

    def attend(self, call: AttentionCall, dense: Dense) -> Tensor:
        """The call's result, sparse when nothing speaks against it, else from dense()."""
        if self._handing_on:
            return dense()
        facts = call.facts
        options: Mapping[str, Any] = call.options.get("transformer_options") or {}
        block = self.layout.block_index(options, self.self_attention_calls)
        if facts.is_self_attention and facts.query_tokens >= self.layout.grid_tokens:
            self.self_attention_calls += 1
        reason = self.dense_because
        if reason is None and call.q.device != self.device:
            reason = f"tensors on {call.q.device} in a forward pass on {self.device}"
        reason = dense_reason(facts, block, reason, self.layout, self.run.settings)
        if reason is None:
            try:
                return self._sparse(call, facts.query_tokens, options)
            except Unsupported as refusal:
                reason = refusal.reason
            except KernelBuildError as error:
                logger.error("[Sparge] %s", error)
                reason = self.dense_because = KERNEL_DID_NOT_COMPILE
                self.run.give_up(self.device, reason)
        self.run.tally.add_dense(reason, facts.query_tokens)
        return self._hand_on(dense)

    def _sparse(self, call: AttentionCall, tokens: int, options: Mapping[str, Any]) -> Tensor:
        references = sum(options.get("reference_image_num_tokens") or ())
        policy = self.run.settings.policy(*self.layout.exact_tokens(tokens, references))
        assert self.stats is not None
        out = call.sparse(policy, self.stats)
        self.run.tally.add_sparse(tokens)
        return out

    def _hand_on(self, dense: Dense) -> Tensor:
        """Runs the dense path; should it lead back here, that inner call goes straight on."""
        self._handing_on = True
        try:
            return dense()
        finally:
            self._handing_on = False

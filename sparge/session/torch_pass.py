# SPDX-License-Identifier: Apache-2.0
"""One forward pass of a model that calls `scaled_dot_product_attention`: numbers those calls by
block."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ..checks.validate import check_inference
from ..errors import Unsupported
from ..torch_attention import TORCH_ATTENTION, TorchCall, as_autocast
from .calls import Call, CallFacts, GivenCall, Kind
from .session import Pass
from .tokens import Layer

BESIDE_BLOCKS = "attention beside the model's blocks"


@dataclass(frozen=True, eq=False)
class SdpaCall(GivenCall):
    """One call: q (B, H, N, D), k and v (B, Hkv, M, D), a mask that broadcasts to (B, H, N, M).

    Results of `tensors` are (B, N, H, D), the layout that transformers go on with; those of
    `of_tensors` are (B, H, N, D).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    scale: float | None = None
    options: tuple[str, ...] = ()
    """Names of arguments that change the result and are not served."""
    layout: str = "NHD"

    @cached_property
    def tensors(self) -> Call | str:
        q, k, v = self.q, self.k, self.v
        if not q.ndim == k.ndim == v.ndim == 4 or k.shape != v.shape or q.shape[1] % k.shape[1]:
            sizes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            return f"the model sends shapes that are not served: {sizes}"
        try:  # before it is measured
            check_inference(q, k, v, *(() if self.mask is None else (self.mask,)))
        except Unsupported as refusal:
            return refusal.reason
        return Call(q, k, v, self.scale, self.layout, by_backend=self.mask is None)

    @cached_property
    def facts(self) -> CallFacts:
        return CallFacts(
            query_tokens=self.q.shape[-2],
            key_tokens=self.k.shape[-2],
            has_mask=self.mask is not None,
            masks_keys=self.key_mask is not None,
            unknown_options=self.options,
            heads=self.q.shape[:-2].numel(),
        )

    @property
    def key_mask(self) -> Tensor | None:
        """Mask of one row of keys, maybe repeated for each head (Allegro), or of queries and keys
        (HunyuanVideo 1.5)."""
        mask, (batch, heads, queries, _) = self.mask, self.q.shape
        if mask is None or mask.ndim != 4 or mask.shape[3] != self.k.shape[-2]:
            return None
        of_call = mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
        return mask if of_call and mask.shape[2] in (1, queries) else None

    def of_tensors(self, call: Call) -> SdpaCall:
        return SdpaCall(call.q, call.k, call.v, scale=self.scale, layout="HND")


@dataclass(kw_only=True)
class TorchPass(Pass):
    """One forward pass; whoever drives it says which block runs."""

    _calls: Counter[int] = field(default_factory=Counter, repr=False)
    """Number of the clip's self-attention calls of each block so far."""

    def attend_torch(self, block: int | None, call: TorchCall) -> Tensor | None:
        """Result of a call of `scaled_dot_product_attention`, sparse when nothing speaks against
        it. block: number of the running one; None beside the blocks, where a call is torch's, and
        counted where it is long."""
        options = {"dropout_p": call.dropout_p > 0, "is_causal": call.is_causal}
        changing = tuple(name for name, changes in options.items() if changes)
        q, k, v = (as_autocast(x) for x in call[:3])
        given = SdpaCall(q, k, v, call.attn_mask, call.scale, changing)
        decision, facts = self.decision(given), given.facts
        is_self = decision.kind is not Kind.CROSS
        if block is None:
            if is_self and decision.tokens >= self.session.settings.min_tokens:
                self.session.counts.add_dense(BESIDE_BLOCKS, decision.tokens, False)
            return None
        counts = is_self and min(facts.query_tokens, facts.key_tokens) >= self.layout.grid_tokens
        place = block if self.layout.blocks else 0
        earlier = self._calls[place]
        self._calls[place] += counts
        # Without blocks each call is a layer.
        number, again = (block, earlier) if self.layout.blocks else (earlier, 0)
        layer = Layer(number, self.layout.row(number, again), beside=not counts)

        def exact() -> Tensor:
            named = {"scale": call.scale, "enable_gqa": call.enable_gqa}
            return TORCH_ATTENTION(*call[:6], **named).transpose(1, 2)

        return self.serve(given, decision, layer, exact).transpose(1, 2)

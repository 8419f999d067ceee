# SPDX-License-Identifier: Apache-2.0
"""One forward pass of a model that calls `scaled_dot_product_attention`: numbers those calls by
block."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from ..reasons import Reason
from ..torch_attention import TorchCall, as_autocast
from .calls import Call, Kind, may_be_padding, unknown_options
from .session import Pass
from .tokens import Layer

BESIDE_BLOCKS = Reason("attention beside the model's blocks")


@dataclass(kw_only=True)
class TorchPass(Pass):
    """One forward pass; whoever drives it says which block runs."""

    _calls: Counter[int] = field(default_factory=Counter, repr=False)
    """Number of the clip's self-attention calls of each block so far."""

    def attend_torch(self, block: int | None, call: TorchCall) -> Tensor | None:
        """Result of a call of `scaled_dot_product_attention`, sparse when nothing speaks against
        it. block: number of the running one; None beside the blocks, where a call is torch's, and
        counted where it is long."""
        given = _call_of(call)
        if isinstance(given, Reason):
            self.session.counts.add_dense(given, call.query.shape[-2], False)
            return None
        decision = self.decision(given)
        is_self = decision.kind is not Kind.CROSS
        if block is None:
            if is_self and decision.tokens >= self.session.settings.min_tokens:
                self.session.counts.add_dense(BESIDE_BLOCKS, decision.tokens, False)
            return None
        counts = is_self and min(given.query_tokens, given.key_tokens) >= self.layout.grid_tokens
        place = block if self.layout.blocks else 0
        earlier = self._calls[place]
        self._calls[place] += counts
        # Without blocks each call is a layer.
        number, again = (block, earlier) if self.layout.blocks else (earlier, 0)
        layer = Layer(number, self.layout.row(number, again), beside=not counts)
        out = self.serve(given, decision, layer, lambda: call.exact().transpose(1, 2))
        return out.transpose(1, 2)


def _call_of(call: TorchCall) -> Call | Reason:
    """Call whose result is (B, N, H, D), the layout that models go on with; or the reason why it
    cannot be read."""
    q, k, v = (as_autocast(x) for x in call[:3])
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape != v.shape or q.shape[1] % k.shape[1]:
        sizes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        return Reason(f"the model sends shapes that are not served: {sizes}", "own")
    options = {"dropout_p": call.dropout_p > 0, "is_causal": call.is_causal}
    why_exact = unknown_options(name for name, changes in options.items() if changes)
    mask = call.attn_mask
    # Of three dimensions torch takes the first for heads.
    may_be = mask is not None and mask.ndim != 3 and may_be_padding(mask, q, k)
    key_mask = mask if may_be else None
    return Call(q, k, v, call.scale, "NHD", mask=mask, key_mask=key_mask, why_exact=why_exact)

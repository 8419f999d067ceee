# SPDX-License-Identifier: Apache-2.0
"""One forward pass of a transformer of diffusers: numbers its attention calls by block."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from ...session import Dense, Kind, Layer, Pass
from ...torch_attention import TORCH_ATTENTION, TorchCall, as_autocast
from .call import SdpaCall

BESIDE_BLOCKS = "attention beside the model's blocks"


@dataclass(kw_only=True)
class Forward(Pass):
    """One forward pass; its hooks say which block runs."""

    _calls: Counter[int] = field(default_factory=Counter, repr=False)
    """Number of the clip's self-attention calls of each block so far."""

    def attend(self, given: SdpaCall, block: int, dense: Dense) -> Tensor:
        """Result of a call, sparse when nothing speaks against it, else from dense(). block: number
        of the running one."""
        decision, numbered = self.decision(given), bool(self.layout.blocks)
        facts = given.facts
        long = min(facts.query_tokens, facts.key_tokens) >= self.layout.grid_tokens
        counts = decision.kind is not Kind.CROSS and long
        place = block if numbered else 0
        earlier = self._calls[place]
        # Without blocks each call is a layer.
        number, again = (block, earlier) if numbered else (earlier, 0)
        layer = Layer(number, self.layout.row(number, again), beside=not counts)
        self._calls[place] += counts
        return self.serve(given, decision, layer, dense)

    def attend_torch(self, block: int | None, *args: Any, **kwargs: Any) -> Tensor | None:
        """Result of a call with the arguments of `scaled_dot_product_attention`, as `attend` has
        it. block: None beside the blocks, where a call is torch's, and counted where it is long."""
        given = TorchCall(*args, **kwargs)
        options = {"dropout_p": given.dropout_p > 0, "is_causal": given.is_causal}
        changing = tuple(name for name, changes in options.items() if changes)
        q, k, v = (as_autocast(x) for x in (given.query, given.key, given.value))
        call = SdpaCall(q, k, v, given.attn_mask, given.scale, changing)
        if block is None:
            decision = self.decision(call)
            if (
                decision.kind is not Kind.CROSS
                and decision.tokens >= self.session.settings.min_tokens
            ):
                self.session.counts.add_dense(BESIDE_BLOCKS, decision.tokens, False)
            return None
        exact = partial(TORCH_ATTENTION, *args, **kwargs)
        # Results of a pass have tokens first.
        return self.attend(call, block, lambda: exact().transpose(1, 2)).transpose(1, 2)

# SPDX-License-Identifier: Apache-2.0
"""Self-attention with a padding mask, served as one of the real tokens alone.

Padding is among the text, so the grid stays whole and the real tokens have an order. What the model
asks of the padding itself is a few queries, which attend densely to the real keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checks.padding import key_padding
from ..errors import Unsupported
from ..order.grid import TokenGrid
from .call import Call

#: Reason of a dense call with a mask that is no padding of text.
MASK = "attention mask"
#: Reason of a dense masked call whose batch entries have different numbers of real tokens.
UNEVEN = "attention mask (the prompts of a batch are padded differently)"


@dataclass(frozen=True, eq=False)
class RealTokens:
    """Real tokens of a call with a padding mask.

    index (entries, real tokens) and rest (entries, others), int64: their places in the sequence.
    One entry stands for a whole batch.
    """

    index: Tensor
    rest: Tensor

    def call(self, call: Call) -> Call:
        """Same attention among the real tokens alone, (B, H, S, D) in and out."""
        q, k, v = (_take(x, self.index) for x in call.qkv)
        return replace(call, q=q, k=k, v=v, layout="HND")

    def rows(self, call: Call, out: Tensor) -> Tensor:
        """Rows of the real tokens in a result of `call`, as `self.call` has it."""
        return _take(call.result_heads_first(out), self.index)

    def whole(self, call: Call, real: Call, out: Tensor) -> Tensor:
        """Result of `call`, from that of its real tokens."""
        batch, heads, tokens, head_dim = call.q.shape
        result = call.q.new_empty(batch, tokens, heads, head_dim)
        _put(result, self.index, out)
        if self.rest.shape[1]:
            k, v = real.k.to(result.dtype), real.v.to(result.dtype)
            rest = replace(real, q=_take(call.q, self.rest), k=k, v=v)
            _put(result, self.rest, rest.exact())
        return call.result(result.transpose(1, 2))


def real_tokens(mask: Tensor, known: TokenGrid | None) -> RealTokens | str | None:
    """Real tokens of a mask that is one row of keys for each batch entry: None where all tokens are
    real, or why the call stays dense. Waits for the mask's device once.

    known: whole sequence, of which padding is never on the grid; None where that is not known.
    """
    row = mask.reshape(-1, mask.shape[-1]).cpu()
    try:
        padding = key_padding(row)
    except (Unsupported, ValueError):
        return MASK
    if padding.key_lengths is None:
        return None
    counts = padding.key_lengths.tolist()
    hidden = ~row if row.dtype == torch.bool else row != 0
    if known is not None:
        of_grid = slice(known.prefix, known.tokens - known.suffix)
        if row.shape[-1] != known.tokens or hidden[:, of_grid].any():
            return MASK
    if min(counts) != max(counts):
        return UNEVEN
    if not counts[0]:
        return MASK
    # Stable: real tokens keep their order.
    places = hidden.to(torch.uint8).argsort(dim=1, stable=True).to(mask.device)
    return RealTokens(places[:, : counts[0]], places[:, counts[0] :])


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Takes rows: (B, H, n, D) of (B, H, N, D)."""
    if places.shape[0] == 1:
        return x.index_select(2, places[0])
    entry = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return x[entry, :, places].transpose(1, 2)


def _put(result: Tensor, places: Tensor, rows: Tensor) -> None:
    """Writes rows (B, H, n, D) into result (B, N, H, D)."""
    rows = rows.transpose(1, 2).to(result.dtype)
    if places.shape[0] == 1:
        result[:, places[0]] = rows
        return
    result[torch.arange(result.shape[0], device=result.device).unsqueeze(1), places] = rows

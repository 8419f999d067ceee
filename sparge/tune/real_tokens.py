# SPDX-License-Identifier: Apache-2.0
"""Self-attention with a padding mask, served as one of the real tokens alone.

Padding is among the text, so the grid stays whole and the real tokens have an order. What the model
asks of the padding itself is a few queries, which attend densely to the real keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks.padding import CAPTURED, as_rows, is_captured, key_padding
from ..common.weak_cache import WeakTensorCache
from ..errors import Unsupported
from ..order.grid import TokenGrid
from .call import Call

#: Reason of a dense call with a mask that is no padding of text.
MASK = "attention mask"
#: Reason of a dense masked call whose batch entries have different numbers of real tokens.
UNEVEN = "attention mask (the prompts of a batch are padded differently)"
_KEPT = 8  # masks of a pass that are remembered


@dataclass(frozen=True, eq=False)
class RealTokens:
    """Real tokens of a call with a padding mask.

    index (entries, real tokens) and rest (entries, others), int64: their places in the sequence.
    One entry stands for a whole batch.
    """

    index: Tensor
    rest: Tensor
    hides_queries: bool
    """Whether the rest sees nothing, and is 0."""

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
        if self.hides_queries:
            _put(result, self.rest, result.new_zeros(batch, heads, self.rest.shape[1], head_dim))
        elif self.rest.shape[1]:
            k, v = real.k.to(result.dtype), real.v.to(result.dtype)
            rest = replace(real, q=_take(call.q, self.rest), k=k, v=v)
            _put(result, self.rest, rest.exact())
        return call.result(result.transpose(1, 2))


class ReadMasks:
    """Masks of the self-attention calls of one pass, and the real tokens that they leave.

    The host waits for the mask of each call, so the GPU's queue runs empty there: a model may fill
    it anew between two layers. It does not wait where the same object comes again and PyTorch says
    that nobody changed it, which it says of no tensor that was made in inference mode.
    """

    def __init__(self, known: TokenGrid | None) -> None:
        """known: whole sequence, of which padding is never on the grid; None where that is not
        known."""
        self._known = known
        self._rows: WeakTensorCache[_Row | str] = WeakTensorCache(_KEPT)
        self._found: list[tuple[_Row, RealTokens | str | None]] = []

    def real_tokens(self, mask: Tensor) -> RealTokens | str | None:
        """Real tokens of a call with this mask: None where all tokens are, or why the call stays
        dense. mask: (N), or with dimensions in front of it for batch entries, heads and queries."""
        if is_captured(mask):
            return CAPTURED
        row = self._rows.get(mask)
        if row is None:
            row = self._rows.add(mask, _read(mask))
        if isinstance(row, str):
            return row
        for earlier, found in self._found:
            if row.hides_queries == earlier.hides_queries and torch.equal(row.keys, earlier.keys):
                return found
        self._found.append((row, row.real_tokens(self._known, mask.device)))
        return self._found[-1][1]


class _Row(NamedTuple):
    """Row of a mask for each batch entry, on the host."""

    keys: Tensor
    hides_queries: bool
    """Whether what a hidden token asks for is hidden, too."""

    def real_tokens(self, known: TokenGrid | None, device: torch.device) -> RealTokens | str | None:
        try:
            padding = key_padding(self.keys)
        except (Unsupported, ValueError):
            return MASK
        if padding.key_lengths is None:
            return None
        counts = padding.key_lengths.tolist()
        hidden = ~self.keys if self.keys.dtype == torch.bool else self.keys != 0
        if known is not None:
            of_grid = slice(known.prefix, known.tokens - known.suffix)
            if hidden.shape[-1] != known.tokens or hidden[:, of_grid].any():
                return MASK
        if min(counts) != max(counts):
            return UNEVEN
        if not counts[0]:
            return MASK
        # Stable: real tokens keep their order.
        places = hidden.to(torch.uint8).argsort(dim=1, stable=True).to(device)
        return RealTokens(places[:, : counts[0]], places[:, counts[0] :], self.hides_queries)


def _read(mask: Tensor) -> _Row | str:
    """Row of a mask, or why it is no padding. Waits for its device."""
    try:
        rows = as_rows(mask[:, None] if mask.dim() == 3 else mask)
    except ValueError:
        return MASK
    hides_queries = rows.shape[2] > 1
    if hides_queries and (rows.dtype != torch.bool or rows.shape[1] > 1):
        return MASK
    if hides_queries:
        keys, queries = rows.any(-2)[:, 0], rows.any(-1)[:, 0]
        # A mask of only these rows and columns that has all of their places.
        whole = rows.sum((1, 2, 3)) == keys.sum(1) * queries.sum(1)
        fits = (keys == queries).all() & whole.all()
    else:
        keys = rows[:, 0, 0]
        fits = (rows == rows[:, :1]).all()
    fits = fits.to(keys.dtype).expand(keys.shape[0], 1)
    read = torch.cat([keys, fits], 1).cpu()
    return _Row(read[:, :-1], hides_queries) if read[0, -1] else MASK


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

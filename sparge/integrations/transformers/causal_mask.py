# SPDX-License-Identifier: Apache-2.0
"""Causal mask of a long prefill that is made only where something reads it.

transformers makes one mask for all layers before it knows which of them read it, and hands it
through code that expects a tensor. For 128K tokens it is 16 GiB. Ours is a tensor without memory
that knows what it would say; any operation on it makes it, so nobody reads something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ...compiling import being_recorded


@dataclass(frozen=True)
class Prefill:
    """Which keys the queries of a plain causal call see: query i is token `before` + i of its
    sequence, and sees itself and the real tokens in front of it."""

    queries: int
    before: int
    """Tokens before the first query, which have keys in a cache."""
    real: tuple[tuple[int, int], ...] | None = None
    """First real token of each batch entry, and the one after its last; None where all are."""

    @property
    def tokens(self) -> int:
        """Number of keys that are there; a static cache has room for more behind them."""
        return self.before + self.queries


def prefill(
    queries: int, before: int | Tensor, real_tokens: Tensor | None, batch: int
) -> Prefill | None:
    """Reads a padding mask (B, tokens or more), bool; None where real tokens have holes between
    them, or nobody can read it, as a fake tensor, or while a CUDA graph is captured. Waits for the
    device once."""
    given = [x for x in (before, real_tokens) if isinstance(x, Tensor)]
    if any(type(x) is not Tensor or being_recorded(x.device) for x in given):
        return None
    before = int(before)
    if real_tokens is None:
        return Prefill(queries, before)
    seen = real_tokens[:, : before + queries]
    if seen.shape[0] != batch:
        return None
    places = torch.arange(seen.shape[1], device=seen.device)
    first = torch.where(seen, places, seen.shape[1]).amin(1)
    end = torch.where(seen, places + 1, 0).amax(1)
    rows = torch.stack([first, end, seen.sum(1)], 1).tolist()
    if any(count != end - first for first, end, count in rows if count):
        return None
    spans = tuple((first, end) if count else (0, 0) for first, end, count in rows)
    whole = all(span == (0, before + queries) for span in spans)
    return Prefill(queries, before, None if whole else spans)


_MOVES = (torch.ops.aten.to, torch.ops.aten._to_copy)


class CausalMask(Tensor):
    """Mask (B, 1, Nq, Nk) that `make` makes: a tensor for True; for False also None, where torch's
    `is_causal` says the same."""

    prefill: Prefill
    make: Callable[[bool], Tensor | None]

    def __new__(
        cls,
        prefill: Prefill,
        make: Callable[[bool], Tensor | None],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> CausalMask:
        mask = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, shape, dtype=dtype, device=torch.device(device)
        )
        mask.prefill, mask.make = prefill, make
        return mask

    def copy_on(self, device: torch.device) -> CausalMask:
        """The same on another device, where a model is spread over several."""

        def make(as_tensor: bool) -> Tensor | None:
            made = self.make(as_tensor)
            return None if made is None else made.to(device)

        return CausalMask(self.prefill, make, tuple(self.shape), self.dtype, device)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _MOVES:
            stand_in = torch.empty((), dtype=args[0].dtype, device=args[0].device)
            moved = func(stand_in, *args[1:], **kwargs)
            if moved.dtype == stand_in.dtype:
                return args[0] if moved is stand_in else args[0].copy_on(moved.device)

        def made(x: Any) -> Any:
            return x.make(True) if isinstance(x, cls) else x

        return func(*tree_map(made, args), **tree_map(made, kwargs))

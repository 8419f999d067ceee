# SPDX-License-Identifier: Apache-2.0
"""Views (B, H, N, D) of q, k and v of a call, from the shapes that ComfyUI's backends take.

Models send what those happen to accept: SD3's v has heads of its own where q and k are flat. What
else somebody's model or node may send is nothing to guess at: such a call stays dense.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Operands:
    """Views (B, H, N, D) that go together: one batch, one head_dim, k and v alike. k and v may have
    fewer heads (GQA) and another number of tokens than q."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, heads: int, skip_reshape: bool) -> Operands | str:
        """Makes the views, as in `AttentionCall`; or returns why there are none, for the user.

        The views are plain tensors: a GGUF loader's class, which changes new_empty, clone and
        shape, passes from the weights of a norm to q and k when DynamicVRAM loads the model.
        """
        q, k, v = (x.as_subclass(Tensor) for x in (q, k, v))
        if skip_reshape:
            views = (q, k, v) if q.ndim == k.ndim == v.ndim == 4 else None
        else:
            views = _split(q, k, v, heads)
        if views is None or not _go_together(*views):
            sizes = ", ".join(
                f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v))
            )
            return f"the model sends shapes that this node does not serve: {sizes}"
        return cls(*views)


def _split(q: Tensor, k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Splits q (B, N, H*D), and k and v flat or with heads as a dimension of their own."""
    if q.ndim != 3 or heads < 1 or q.shape[-1] % heads or not (q.numel() and k.numel()):
        return None
    head_dim = q.shape[-1] // heads
    found = []
    for x in (q, k, v):
        if x.ndim == 3 and x.shape[0] != q.shape[0] and x.numel() % (len(q) * x.shape[-1]) == 0:
            x = x.reshape(len(q), -1, x.shape[-1])  # HyperTile cuts queries alone into tiles
        if x.ndim == 3 and x.shape[-1] % head_dim == 0:
            x = x.unflatten(-1, (-1, head_dim))
        if x.ndim != 4:
            return None
        found.append(x.transpose(1, 2))
    return found[0], found[1], found[2]


def _go_together(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if not (q.numel() and k.numel()) or k.shape != v.shape:
        return False
    return q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and q.shape[1] % k.shape[1] == 0

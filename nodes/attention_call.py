# SPDX-License-Identifier: Apache-2.0
"""Attention call in ComfyUI's conventions, and the same call in the library's. No copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend

from ..sparge import (
    AttentionStats,
    HeadSettings,
    SparsePolicy,
    TokenOrder,
    Unsupported,
    attention,
)
from ..sparge.speed.worth import torch_kernel
from .decision import CallFacts
from .operands import Operands

Dense = Callable[[], Tensor]

#: Keywords that do not change the result, or that the library honours.
_KNOWN_OPTIONS = frozenset(
    {
        "transformer_options",
        "_inside_attn_wrapper",
        "low_precision_attention",
        "preferred_attention",
        "enable_gqa",
        "scale",
    }
)


@dataclass(frozen=True)
class AttentionCall:
    """One call: q, k, v are (B, S, H*D), or (B, H, S, D) when ``skip_reshape``, in any strides. k
    and v may be (B, S, H, D) as well.

    `odd_shapes` tells others, and only what does without `operands` may be asked of those. The
    result is (B, S, H*D), or (B, H, S, D) when ``skip_output_reshape``, in q's dtype.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int
    has_mask: bool
    skip_reshape: bool
    skip_output_reshape: bool
    options: dict[str, Any]
    sdpa_order: Sequence[SDPBackend] | None = None
    """Order in which PyTorch is asked to choose a kernel where its attention serves a dense call,
    empty for its own order; None where something else may serve it."""
    mask: Tensor | None = None

    @cached_property
    def _views(self) -> Operands | str:
        return Operands.of(self.q, self.k, self.v, self.heads, self.skip_reshape)

    @property
    def odd_shapes(self) -> str | None:
        """Reason why the call cannot be but dense, whatever else is known of it; None for a usual
        one."""
        return self._views if isinstance(self._views, str) else None

    @property
    def operands(self) -> Operands:
        """Returns q, k and v as operands. Raises sparge.Unsupported where there are
        `odd_shapes`.
        """
        if isinstance(self._views, str):
            raise Unsupported(self._views)
        return self._views

    @property
    def facts(self) -> CallFacts:
        return CallFacts(
            query_tokens=self._tokens(self.q),
            key_tokens=self._tokens(self.k),
            has_mask=self.has_mask,
            masks_keys=self.key_mask is not None,
            refuses_low_precision=self.options.get("low_precision_attention") is False,
            unknown_options=tuple(
                name
                for name, value in self.options.items()
                if name not in _KNOWN_OPTIONS and value is not None and value is not False
            ),
        )

    @property
    def query_tokens(self) -> int:
        return self._tokens(self.q)

    @property
    def key_mask(self) -> Tensor | None:
        """Mask of the call where it is one row of keys for all heads and queries of a batch entry,
        else None."""
        if self.mask is None or not 2 <= self.mask.ndim <= 4:
            return None
        entries, *same, keys = self.mask.shape if self.mask.ndim > 2 else (1, *self.mask.shape)
        of_batch = entries in (1, self.q.shape[0]) and keys == self._tokens(self.k)
        return self.mask if of_batch and set(same) == {1} else None

    def _tokens(self, tensor: Tensor) -> int:
        """Number of tokens of `tensor`, as far as its shape tells; 0 where it does not."""
        if not self.skip_reshape and tensor.ndim > 4:  # as ComfyUI's backends would read it
            return tensor.numel() // max(1, tensor.shape[0] * self.q.shape[-1])
        if not self.skip_reshape and tensor.ndim == 3 and len(tensor) != len(self.q):
            return tensor.numel() // max(1, len(self.q) * tensor.shape[2])  # as in `Operands.of`
        place = 2 if self.skip_reshape else 1
        return tensor.shape[place] if tensor.ndim > place else 0

    @property
    def head_count(self) -> int:
        return self.operands.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.operands.q.shape[3]

    @property
    def shares_keys(self) -> bool:
        """Whether several heads read the same keys and values (GQA)."""
        return self.operands.k.shape[1] != self.operands.q.shape[1]

    def dense_kernel(self) -> str:
        """Kernel that PyTorch would take for a dense call; "" when that is not known."""
        if self.sdpa_order is None or self.shares_keys:
            return ""
        q, k, v = self.heads_first()
        return torch_kernel(q, k, v, self.sdpa_order)

    @property
    def scale(self) -> float | None:
        return self.options.get("scale")

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views (B, H, S, D) of q, k and v."""
        return self.operands.q, self.operands.k, self.operands.v

    def result_heads_first(self, out: Tensor) -> Tensor:
        """View (B, H, S, D) of a result of this call. Raises sparge.Unsupported for one of another
        shape, which a node that serves the dense calls may give."""
        out = out.as_subclass(Tensor)  # as in `Operands.of`
        batch, heads, tokens, head_dim = self.operands.q.shape
        of_heads = (batch, heads, tokens, head_dim)
        usual = of_heads if self.skip_output_reshape else (batch, tokens, heads * head_dim)
        if tuple(out.shape) != usual:
            raise Unsupported(
                f"dense attention gave {tuple(out.shape)} instead of {usual}, so it is not measured"
            )
        return out if self.skip_output_reshape else out.unflatten(-1, (heads, -1)).transpose(1, 2)

    def sparse(
        self,
        policy: SparsePolicy,
        stats: AttentionStats,
        order: TokenOrder | None = None,
        head_settings: HeadSettings | None = None,
    ) -> Tensor:
        """Computes the call sparse. Raises sparge.Unsupported when the library cannot serve it."""
        out = attention(
            *self.heads_first(),
            policy,
            layout="HND",
            out_layout="HND" if self.skip_output_reshape else "NHD",
            scale=self.scale,
            order=order,
            head_settings=head_settings,
            stats=stats,
            output_dtype=self.q.dtype,
        )
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return out if self.skip_output_reshape else out.flatten(2)

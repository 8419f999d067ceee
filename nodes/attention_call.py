# SPDX-License-Identifier: Apache-2.0
"""One attention call in ComfyUI's conventions, and the same call in the library's. No copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend

from ..sparge import AttentionStats, HeadBudget, SparsePolicy, TokenOrder, attention
from ..sparge.plan.worth import torch_kernel
from .decision import CallFacts

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
    """q, k, v are (B, S, H*D), or (B, H, S, D) when ``skip_reshape``, in any strides.

    The result is (B, S, H*D), or (B, H, S, D) when ``skip_output_reshape``, in q's dtype.
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
    """Where PyTorch's attention serves a dense call: in what order it is asked to choose a kernel,
    empty for its own; None where something else may serve it."""

    @property
    def facts(self) -> CallFacts:
        token_dim = 2 if self.skip_reshape else 1
        return CallFacts(
            query_tokens=self.q.shape[token_dim],
            key_tokens=self.k.shape[token_dim],
            has_mask=self.has_mask,
            refuses_low_precision=self.options.get("low_precision_attention") is False,
            unknown_options=tuple(
                name
                for name, value in self.options.items()
                if name not in _KNOWN_OPTIONS and value is not None and value is not False
            ),
        )

    def _per_head(self, tensor: Tensor) -> Tensor:
        """A view with heads as a dimension of their own; k and v may have fewer of them (GQA).

        A plain tensor: a GGUF loader's class, which changes new_empty, clone and shape, passes from
        the weights of a norm to q and k when DynamicVRAM loads the model.
        """
        tensor = tensor.as_subclass(Tensor)
        if self.skip_reshape:
            return tensor
        return tensor.unflatten(-1, (-1, self.q.shape[-1] // self.heads))

    @property
    def head_count(self) -> int:
        return self.q.shape[1] if self.skip_reshape else self.heads

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1] if self.skip_reshape else self.q.shape[-1] // self.heads

    @property
    def shares_keys(self) -> bool:
        """Several heads read the same keys and values (GQA)."""
        heads = 1 if self.skip_reshape else -1
        return self.k.shape[heads] != self.q.shape[heads]

    def dense_kernel(self) -> str:
        """The kernel that PyTorch would take for a dense call; "" when that is not known."""
        if self.sdpa_order is None or self.shares_keys:
            return ""
        q, k, v = self.heads_first()
        return torch_kernel(q, k, v, self.sdpa_order)

    @property
    def scale(self) -> float | None:
        return self.options.get("scale")

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views (B, H, S, D) of q, k and v."""
        q, k, v = (self._per_head(tensor) for tensor in (self.q, self.k, self.v))
        return (q, k, v) if self.skip_reshape else (_swapped(q), _swapped(k), _swapped(v))

    def result_heads_first(self, out: Tensor) -> Tensor:
        """A view (B, H, S, D) of a result of this call."""
        out = out.as_subclass(Tensor)  # as `_per_head`
        if self.skip_output_reshape:
            return out
        return _swapped(out.unflatten(-1, (self.head_count, -1)))

    def sparse(
        self,
        policy: SparsePolicy,
        stats: AttentionStats,
        order: TokenOrder | None = None,
        budget: HeadBudget | None = None,
    ) -> Tensor:
        """Raises sparge.Unsupported when the library cannot serve the call."""
        out = attention(
            self._per_head(self.q),
            self._per_head(self.k),
            self._per_head(self.v),
            policy,
            layout="HND" if self.skip_reshape else "NHD",
            out_layout="HND" if self.skip_output_reshape else "NHD",
            scale=self.scale,
            order=order,
            budget=budget,
            stats=stats,
            output_dtype=self.q.dtype,
        )
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return out if self.skip_output_reshape else out.flatten(2)


def _swapped(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)

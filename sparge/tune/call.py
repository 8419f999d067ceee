# SPDX-License-Identifier: Apache-2.0
"""One attention call of a host's model, as a session takes it, before it is validated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from ..attention import attention
from ..checks.validate import as_heads_first
from ..errors import Unsupported
from ..head_settings import HeadSettings
from ..order.grid import TokenOrder
from ..policy import SparsePolicy
from ..speed.worth import torch_kernel
from ..stats import AttentionStats


@dataclass(frozen=True, eq=False)
class Call:
    """A call by views of its tensors: q (B, H, N, D), k and v (B, Hkv, M, D), in any strides."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None = None
    layout: str = "HND"
    """Layout of its result: "HND" (B, H, N, D), "NHD" (B, N, H, D) or "flat" (B, N, H*D)."""
    sdpa_order: Sequence[SDPBackend] | None = ()
    """Order in which PyTorch is asked to choose a kernel where its attention serves an exact call,
    empty for its own order; None where something else may serve it."""

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, layout: str, scale: float | None) -> Call:
        """Call of tensors in the layout of the result."""
        q, k, v = (as_heads_first(n, x, layout) for n, x in (("q", q), ("k", k), ("v", v)))
        return cls(q, k, v, scale, layout)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def query_tokens(self) -> int:
        return self.q.shape[2]

    @property
    def head_count(self) -> int:
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def shares_keys(self) -> bool:
        """Whether several heads read the same keys and values (GQA)."""
        return self.k.shape[1] != self.q.shape[1]

    def result_heads_first(self, out: Tensor) -> Tensor:
        """View (B, H, N, D) of a result. Raises sparge.Unsupported for one of another shape, which
        whatever serves the host's exact calls may give."""
        out = out.as_subclass(Tensor)
        batch, heads, tokens, head_dim = self.q.shape
        usual = {
            "HND": (batch, heads, tokens, head_dim),
            "NHD": (batch, tokens, heads, head_dim),
            "flat": (batch, tokens, heads * head_dim),
        }[self.layout]
        if tuple(out.shape) != usual:
            raise Unsupported(
                f"dense attention gave {tuple(out.shape)} instead of {usual}, so it is not measured"
            )
        out = out.unflatten(-1, (heads, -1)) if self.layout == "flat" else out
        return out if self.layout == "HND" else out.transpose(1, 2)

    def result(self, out: Tensor) -> Tensor:
        """Result in its layout, from one (B, H, N, D)."""
        if self.layout == "HND":
            return out
        return out.transpose(1, 2) if self.layout == "NHD" else out.transpose(1, 2).flatten(2)

    def dense_kernel(self) -> str:
        """Kernel that PyTorch would take for an exact call; "" where that is not known."""
        if self.sdpa_order is None or self.shares_keys:
            return ""
        return torch_kernel(*self.qkv, self.sdpa_order)

    def exact(self) -> Tensor:
        """Result of PyTorch's own attention."""
        return self.result(
            scaled_dot_product_attention(*self.qkv, scale=self.scale, enable_gqa=self.shares_keys)
        )

    def sparse(
        self,
        policy: SparsePolicy,
        stats: AttentionStats,
        order: TokenOrder | None = None,
        head_settings: HeadSettings | None = None,
    ) -> Tensor:
        """Raises sparge.Unsupported where the library cannot serve the call."""
        out = attention(
            *self.qkv,
            policy,
            layout="HND",
            out_layout="HND" if self.layout == "HND" else "NHD",
            scale=self.scale,
            order=order,
            head_settings=head_settings,
            stats=stats,
            output_dtype=self.q.dtype,
        )
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return out.flatten(2) if self.layout == "flat" else out


class ExactOnce:
    """Exact result of a call in its layout, computed once however often it is asked for."""

    def __init__(
        self, compute: Callable[[], Tensor], faster: Callable[[], Tensor | None] | None = None
    ) -> None:
        """compute: by whatever serves the host's exact calls. faster: by a faster kernel; gives
        None where none is known."""
        self._compute, self._faster = compute, faster
        self._out: Tensor | None = None
        self.by_faster = False
        """Whether a faster kernel gave it."""
        self.failure: Exception | None = None
        """Error that `compute` raised: not one of this pack."""

    def own(self) -> Tensor:
        if self._out is None:
            try:
                self._out = self._compute()
            except Exception as error:
                self.failure = error
                raise
        return self._out

    def try_faster(self) -> None:
        """Takes the result of a faster kernel, where one is known."""
        if self._out is None and self._faster is not None:
            self._out = self._faster()
            self.by_faster = self._out is not None

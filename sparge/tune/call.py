# SPDX-License-Identifier: Apache-2.0
"""One attention call of a host's model, as a session takes it, before it is validated."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import Tensor

from ..attention import attention
from ..checks.validate import as_heads_first
from ..common.torch_attention import exact_attention
from ..errors import Unsupported
from ..head_settings import HeadSettings
from ..order.grid import TokenOrder
from ..policy import EIGHT_BIT_DENSE, SparsePolicy
from ..speed.table import Size
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
    by_backend: bool = True
    """Whether what serves the host's exact calls is what the speed table timed, without a mask:
    else a dense call is exact, and nothing is known of its time."""

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
    def pairs(self) -> int:
        """Number of query-key pairs of all heads and batch entries."""
        return self.q.shape[:-1].numel() * self.k.shape[2]

    @property
    def size(self) -> Size:
        """Size that its time follows from, of all entries of the batch."""
        return Size(self.query_tokens, self.q.shape[0] * self.head_count, self.head_dim)

    @property
    def look(self) -> Hashable:
        """Facts that calls share which look alike: what a session decides on them is the same."""
        return self.q.shape, self.k.shape, self.q.dtype, self.q.device, self.by_backend

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

    def empty_result(self) -> Tensor:
        """Memory for a result, as a view (B, H, N, D)."""
        batch, heads, tokens, head_dim = self.q.shape
        if self.layout == "HND":
            return self.q.new_empty(self.q.shape)
        return self.q.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)

    def exact(self) -> Tensor:
        """Result of PyTorch's own attention."""
        return self.result(
            exact_attention(*self.qkv, scale=self.scale, enable_gqa=self.shares_keys)
        )

    def sparse(
        self,
        policy: SparsePolicy,
        stats: AttentionStats | None = None,
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

    def eight_bit(self) -> Tensor:
        """Result of 8-bit dense attention. Raises sparge.Unsupported likewise."""
        return self.sparse(EIGHT_BIT_DENSE)


def _exact() -> None:
    """Stands for 8-bit dense attention where a call has to be exact."""


class DenseOnce:
    """Dense result of a call in its layout, computed once however often it is asked for."""

    def __init__(
        self, exact: Callable[[], Tensor], eight_bit: Callable[[], Tensor | None] = _exact
    ) -> None:
        """exact: by whatever serves the host's exact calls. eight_bit: by 8-bit dense attention;
        gives None where exact attention is to be."""
        self._exact, self._eight_bit = exact, eight_bit
        self._out: Tensor | None = None
        self.by_eight_bit = False
        """Whether it is that of 8-bit dense attention."""
        self.failure: Exception | None = None
        """Error that `exact` raised: not one of this pack."""

    def result(self) -> Tensor:
        if self._out is None:
            self._out = self._eight_bit()
            self.by_eight_bit = self._out is not None
        if self._out is None:
            try:
                self._out = self._exact()
            except Exception as error:
                self.failure = error
                raise
        return self._out

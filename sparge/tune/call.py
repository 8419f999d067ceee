# SPDX-License-Identifier: Apache-2.0
"""One self-attention call of a host's model, as a session takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..attention import attention
from ..checks.validate import as_heads_first
from ..errors import Unsupported
from ..head_settings import HeadSettings
from ..order.grid import TokenOrder
from ..policy import SparsePolicy
from ..speed.worth import torch_kernel
from ..stats import AttentionStats


class Call(Protocol):
    """A call in a host's own layout. Sizes are known without reading a tensor."""

    @property
    def q(self) -> Tensor:
        """Queries in the host's layout."""
        ...

    @property
    def query_tokens(self) -> int: ...

    @property
    def head_count(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def shares_keys(self) -> bool:
        """Whether several heads read the same keys and values (GQA)."""
        ...

    @property
    def scale(self) -> float | None: ...

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views (B, H, N, D) of q, k and v."""
        ...

    def result_heads_first(self, out: Tensor) -> Tensor:
        """A view (B, H, N, D) of a result in the host's layout.

        Raises sparge.Unsupported for one of another shape.
        """
        ...

    def dense_kernel(self) -> str:
        """The kernel that PyTorch would take for an exact call; "" where that is not known."""
        ...


class Exact(Protocol):
    """The exact result of a call in the host's layout, computed once however often it is asked."""

    def own(self) -> Tensor:
        """Result of whatever serves the host's exact calls."""
        ...

    def fastest(self) -> Tensor:
        """Result of a faster kernel, where one is known."""
        ...


@dataclass(frozen=True, eq=False)
class TensorCall:
    """A call without a host: q (B, H, N, D), k and v (B, Hkv, N, D) for layout "HND", (B, N, H, D)
    and so on for "NHD"; the result has q's shape."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: str = "HND"
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("q", "k", "v"):
            as_heads_first(name, getattr(self, name), self.layout)

    @property
    def query_tokens(self) -> int:
        return self._heads_first(self.q).shape[2]

    @property
    def head_count(self) -> int:
        return self._heads_first(self.q).shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def shares_keys(self) -> bool:
        return self._heads_first(self.k).shape[1] != self.head_count

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(self._heads_first, (self.q, self.k, self.v))
        return q, k, v

    def result_heads_first(self, out: Tensor) -> Tensor:
        if out.shape != self.q.shape:
            raise Unsupported(
                f"exact attention gave {tuple(out.shape)} instead of {tuple(self.q.shape)}, so it "
                "is not measured"
            )
        return self._heads_first(out)

    def dense_kernel(self) -> str:
        return "" if self.shares_keys else torch_kernel(*self.heads_first(), ())

    def exact(self) -> Tensor:
        """Result of PyTorch's own attention."""
        q, k, v = self.heads_first()
        out = scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=self.shares_keys)
        return self._heads_first(out)

    def sparse(
        self,
        policy: SparsePolicy,
        stats: AttentionStats,
        order: TokenOrder | None,
        head_settings: HeadSettings | None,
    ) -> Tensor:
        """Raises sparge.Unsupported where the library cannot serve the call."""
        out = attention(
            *self.heads_first(),
            policy,
            layout="HND",
            out_layout=self.layout,
            scale=self.scale,
            order=order,
            head_settings=head_settings,
            stats=stats,
            output_dtype=self.q.dtype,
        )
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return out

    def _heads_first(self, tensor: Tensor) -> Tensor:
        """A view; it is its own inverse."""
        return tensor if self.layout == "HND" else tensor.transpose(1, 2)


class ExactOnce:
    """The exact result of a call, from a function that gives it in the host's layout."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._out: Tensor | None = None
        self.failure: Exception | None = None
        """Error that the function raised."""

    def own(self) -> Tensor:
        if self._out is None:
            try:
                self._out = self._compute()
            except Exception as error:
                self.failure = error
                raise
        return self._out

    def fastest(self) -> Tensor:
        return self.own()

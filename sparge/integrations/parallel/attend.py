# SPDX-License-Identifier: Apache-2.0
"""Attention of one rank, where an engine splits a sequence over several GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...attention import attention
from ...call_stats import count_exact
from ...checks.argument import check_kind, check_tensor, flag, whole_number
from ...checks.torch_call import as_autocast, why_exact
from ...checks.validate import as_heads_first
from ...common.torch_attention import exact_attention
from ...errors import Unsupported
from ...head_settings import HeadSettings
from ...order.grid import TokenGrid
from ...policy import EIGHT_BIT_DENSE, SparsePolicy
from ...sdpa import MIN_TOKENS
from .seen_tokens import SeenTokens
from .stats import RankStats

#: What is said of calls that keep everything, in 8 bits.
IN_EIGHT_BITS = "so all was kept, in 8 bits, because the log-sum-exp is asked for"
GRID_UNDER_RING = (
    "A grid or places and ring=True do not go together: ring attention gives a rank the keys in "
    "chunks, and a token order is one of the whole sequence. Leave them out; exact_prefix and "
    "exact_suffix of the policy count in each chunk."
)
SETTINGS_UNDER_RING = (
    "Head settings and ring=True do not go together: they are measured over all keys, and ring "
    "attention gives a rank the keys in chunks. Use Ulysses, or a policy alone."
)


#: A result, and its log-sum-exp where that is asked for.
Found = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class RankCall:
    """One call: q (B, H, Nq, D), k and v (B, Hkv, Nk, D), of the heads and tokens of a rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: str
    """Layout of the result."""
    mask: Tensor | None
    scale: float | None
    is_causal: bool
    dropout_p: float

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, layout: str, *others: Any) -> RankCall:
        """Call of tensors in `layout`."""
        named = {"q": q, "k": k, "v": v}
        q, k, v = (as_autocast(as_heads_first(name, x, layout)) for name, x in named.items())
        return cls(q, k, v, layout, *others)

    def why_not_ours(self) -> str:
        """Reason why we cannot compute the call in any way; empty where we can."""
        if self.mask is not None:
            return "a mask"
        return why_exact(
            self.q, self.k, self.v, None, self.dropout_p, self.is_causal, True, min_tokens=0
        )

    def exact(self) -> Tensor:
        """PyTorch's own result, heads first."""
        return exact_attention(
            self.q,
            self.k,
            self.v,
            self.mask,
            self.dropout_p,
            self.is_causal,
            scale=self.scale,
            enable_gqa=self.q.shape[1] != self.k.shape[1],
        )

    def attend(self, policy: SparsePolicy, return_lse: bool, **more: Any) -> Found:
        """Our result, in `layout`."""
        more |= {
            "out_layout": self.layout,
            "causal": "top-left" if self.is_causal else None,
            "scale": self.scale,
        }
        if return_lse:
            return attention(self.q, self.k, self.v, policy, return_lse=True, **more)
        return attention(self.q, self.k, self.v, policy, **more), None


class RankAttention:
    """Attention function of one rank: of its heads over all tokens (Ulysses), or of its queries
    over one chunk of the keys after the other (ring).

        attend = RankAttention(SparsePolicy(topk=0.3), grid=TokenGrid(21, 30, 52))
        out = attend(q, k, v, layout="NHD")
        print(attend.stats)

    It waits for no other rank, and what it does depends on shapes alone, so all ranks do alike.
    """

    def __init__(
        self,
        policy: SparsePolicy | None = None,
        *,
        grid: TokenGrid | None = None,
        places: Tensor | None = None,
        ring: bool = False,
        min_tokens: int = MIN_TOKENS,
        stats: RankStats | None = None,
    ) -> None:
        """
        Args:
            policy: what to keep. Its exact_prefix and exact_suffix are tokens of the whole sequence
                or, under ring, of each chunk.
            grid: tokens of the whole sequence as they stand without the engine: blocks then hold
                tokens that lie close together, and text stays exact.
            places: (tokens,) int, the token of the whole sequence at each place of what the rank
                sees after the all-to-all (`dealt_places`). Without them a sequence without text is
                taken to come as it is, and no text is kept exact, which is counted and logged.
            ring: whether the function is called for one chunk of the keys after the other.
            min_tokens: calls of fewer queries or keys drop nothing.
            stats: counts that these calls add to.

        Raises:
            Unsupported: a grid or places with ring.
            ValueError: an argument is none of these.
        """
        policy = SparsePolicy() if policy is None else policy
        check_kind("policy", policy, SparsePolicy, "a SparsePolicy, say SparsePolicy(topk=0.3)")
        stats = RankStats() if stats is None else stats
        check_kind("stats", stats, RankStats, "a sparge.integrations.parallel.RankStats()")
        if grid is not None:
            check_kind("grid", grid, TokenGrid, "a TokenGrid, say TokenGrid(21, 30, 52)")
        if places is not None:
            check_tensor("places", places, "the token at each place, one at least")
            if not places.numel():
                raise ValueError("places is empty; give the token at each place.")
        self.stats = stats
        self._ring = flag("ring", ring)
        self._min_tokens = whole_number("min_tokens", min_tokens, 0)
        if self._ring and (grid is not None or places is not None):
            raise Unsupported(GRID_UNDER_RING)
        self._seen = SeenTokens(policy) if self._ring else SeenTokens.of(policy, grid, places)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layout: str = "HND",
        mask: Tensor | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        head_settings: HeadSettings | None = None,
        heads: slice | None = None,
    ) -> Tensor:
        """Result in `layout`. A call that cannot be sparse is PyTorch's own, which is counted with
        the reason.

        head_settings: of all heads of the layer. heads: which of them this rank has, as
        `heads_of_rank` says; all where None.

        Raises:
            Unsupported: head settings under ring.
        """
        head_settings = self._own(head_settings, heads)
        call = RankCall.of(q, k, v, layout, mask, scale, is_causal, dropout_p)
        found = call.why_not_ours() or self._sparse(call, head_settings)
        if isinstance(found, str):
            count_exact(self.stats, found)
            return as_heads_first("the result", call.exact(), layout)
        return found[0]

    def with_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layout: str = "HND",
        scale: float | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        head_settings: HeadSettings | None = None,
        heads: slice | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Result in `layout`, and the natural log-sum-exp (B, H, Nq) float32, by which chunks of
        keys are merged. A call that cannot be sparse keeps all in 8 bits, because PyTorch's own
        gives no such sum; that is counted with the reason.

        Arguments are those of a call without it. Raises Unsupported also where we cannot compute
        the call at all: dropout, gradients, a GPU without kernels.
        """
        head_settings = self._own(head_settings, heads)
        call = RankCall.of(q, k, v, layout, None, scale, is_causal, dropout_p)
        if why := call.why_not_ours():
            raise Unsupported(f"The log-sum-exp is asked for, and this call cannot be ours: {why}.")
        found = self._sparse(call, head_settings, return_lse=True)
        if isinstance(found, str):
            count_exact(self.stats, f"{found}; {IN_EIGHT_BITS}")
            found = call.attend(EIGHT_BIT_DENSE, return_lse=True)
        out, lse = found
        assert lse is not None
        return out, lse

    def _own(self, head_settings: HeadSettings | None, heads: slice | None) -> HeadSettings | None:
        if head_settings is None:
            return None
        if self._ring:
            raise Unsupported(SETTINGS_UNDER_RING)
        return head_settings if heads is None else head_settings.heads_slice(heads)

    def _sparse(
        self, call: RankCall, head_settings: HeadSettings | None, return_lse: bool = False
    ) -> Found | str:
        """Sparse result, or the reason why there is none."""
        queries, keys = call.q.shape[2], call.k.shape[2]
        if min(queries, keys) < self._min_tokens:
            return f"fewer than {self._min_tokens} queries or keys"
        seen = self._seen
        if why := seen.misfit(queries, keys):
            return why
        try:
            found = call.attend(
                seen.policy,
                return_lse,
                order=seen.order,
                head_settings=head_settings,
                stats=self.stats.on(call.q.device),
            )
        except ValueError as error:  # Unsupported among them; PyTorch may serve it
            return str(error)
        if seen.remark:
            self.stats.remark(seen.remark)
        return found

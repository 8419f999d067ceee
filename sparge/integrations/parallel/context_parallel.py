# SPDX-License-Identifier: Apache-2.0
"""Sparse attention under the ContextParallelConfig of diffusers.

    config = ContextParallelConfig(ulysses_degree=2)
    pipe.transformer.enable_parallelism(config=config)
    with context_parallel(pipe.transformer, config, SparsePolicy(topk=0.3)) as stats:
        video = pipe(prompt).frames
    print(stats)

diffusers cuts and joins the tokens; the attention call between is caught. Ulysses makes that of
PyTorch. Ring needs the log-sum-exp, which the backend "_native_flash" asks of PyTorch's flash
attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...call_stats import count_exact
from ...checks.argument import check_kind, whole_number
from ...checks.torch_call import NOT_BY_HEAD, TorchCall
from ...common.compiling import has_been_traced, keep_to_graphs, untraced
from ...order.places import dealt_places, parts_of
from ...policy import SparsePolicy
from ...sampling import TokenLayout
from ...sdpa import MIN_TOKENS, AttentionMode
from ...tune import TextPosition
from ..diffusers.layout import layout_of
from ..diffusers.rows import row_of
from ..stand_in import StandIn
from .attend import RankAttention
from .seen_tokens import TEXT_UNPROTECTED
from .stats import RankStats

#: What the backend "_native_flash" calls; it gives the log-sum-exp, too.
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
WHOLE_GRAPH = (
    "none came, and some model is compiled with fullgraph=True, which leaves no room for it "
    "(compile without fullgraph)"
)
NO_TOKENS = "{name}: its tokens are not known here, so they stay as they come and no text is exact"


class Degrees(Protocol):
    """Fields that are read of diffusers' ContextParallelConfig."""

    ring_degree: int
    ulysses_degree: int


@contextmanager
def context_parallel(
    transformer: nn.Module,
    config: Degrees,
    policy: SparsePolicy | None = None,
    *,
    min_tokens: int = MIN_TOKENS,
) -> Iterator[RankStats]:
    """Context in which the self-attention of a transformer of diffusers is sparse while several
    GPUs share its sequence. Every rank enters it; it gives the counts of this rank.

    transformer: after `enable_parallelism`. For ring its backend is "_native_flash"
        (`transformer.set_attention_backend("_native_flash")`).
    config: the ContextParallelConfig that it was given.
    policy: what to keep; text is exact whatever it says, where the tokens are known
        (`sparge.integrations.diffusers`).
    min_tokens: calls of fewer queries or keys, as a rank sees them, drop nothing.
    """
    policy = SparsePolicy() if policy is None else policy
    check_kind("policy", policy, SparsePolicy, "a SparsePolicy, say SparsePolicy(topk=0.3)")
    ring, ulysses = _degrees(config)
    passes = _Passes(transformer, ring, ulysses, policy, whole_number("min_tokens", min_tokens, 0))
    model: nn.Module = getattr(transformer, "_orig_mod", transformer)
    passes.stats.prepare()
    stand_in = StandIn(model, passes.mode)  # over diffusers' own, which cuts the tokens
    try:
        yield passes.stats
    finally:
        stand_in.remove()
        if has_been_traced() and not passes.stats.sparse_calls + passes.stats.exact_calls:
            count_exact(passes.stats, WHOLE_GRAPH)


def _degrees(config: Any) -> tuple[int, int]:
    try:
        ring, ulysses = config.ring_degree, config.ulysses_degree
    except AttributeError:
        raise ValueError(
            f"config is a {type(config).__name__}; give the ContextParallelConfig that "
            "enable_parallelism was given."
        ) from None
    return whole_number("ring_degree", ring, 1), whole_number("ulysses_degree", ulysses, 1)


class _Passes:
    """Forward passes of one transformer, before diffusers cuts their tokens."""

    def __init__(
        self, transformer: nn.Module, ring: int, ulysses: int, policy: SparsePolicy, min_tokens: int
    ) -> None:
        self.stats = RankStats()
        self._model: Any = getattr(transformer, "_orig_mod", transformer)
        self._ring, self._ulysses = ring, ulysses
        self._policy, self._min_tokens = policy, min_tokens
        self._signature = inspect.signature(type(self._model).forward)
        self._row = row_of(self._model)
        self._attentions: dict[TokenLayout, RankAttention] = {}

    @untraced
    def mode(self, *args: Any, **kwargs: Any) -> AttentionMode:
        """Mode for a pass with these arguments."""
        given = self._signature.bind_partial(self._model, *args, **kwargs).arguments
        layout = layout_of(self._model, self._row, given, None)
        if layout not in self._attentions:
            self._attentions[layout] = self._attention_of(layout)
        return _Mode(self._attentions[layout])

    def _attention_of(self, layout: TokenLayout) -> RankAttention:
        common: dict[str, Any] = {"min_tokens": self._min_tokens, "stats": self.stats}
        tokens = layout.tokens
        if tokens is None:
            if layout.text is not TextPosition.NONE:
                self.stats.remark(NO_TOKENS.format(name=layout.family))
            return RankAttention(self._policy, ring=self._ring > 1, **common)
        if self._ring == 1:
            places = dealt_places(parts_of(tokens), self._ulysses)
            return RankAttention(self._policy, grid=tokens, places=places, **common)
        # Each chunk has its share of the text at its end, where Ulysses does not deal it further.
        ends = {"exact_prefix": tokens.prefix, "exact_suffix": tokens.suffix}
        if self._ulysses > 1:
            if any(ends.values()):
                self.stats.remark(TEXT_UNPROTECTED)
            ends = dict.fromkeys(ends, 0)
        shares = {name: -(-count // self._ring) for name, count in ends.items()}
        return RankAttention(replace(self._policy, **shares), ring=True, **common)


class _Mode(AttentionMode):
    """Mode in which a rank's attention stands in for PyTorch's, and for its flash attention."""

    def __init__(self, attend: RankAttention) -> None:
        super().__init__(self._result)
        self._attend = attend
        keep_to_graphs(_Mode.__torch_function__)

    def _result(self, *args: Any, **kwargs: Any) -> Tensor | None:
        call = TorchCall(*args, **kwargs)
        if any(x.dim() != 4 for x in call[:3]):
            count_exact(self._attend.stats, NOT_BY_HEAD)
            return None
        return self._attend(
            *call[:3],
            mask=call.attn_mask,
            dropout_p=call.dropout_p,
            is_causal=call.is_causal,
            scale=call.scale,
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _FLASH:
            return self._flash(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _flash(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """Results of PyTorch's flash attention; those for a backward pass are empty."""
        out, lse = self._attend.with_lse(
            query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
        nothing = query.new_empty(0)
        return out, lse, nothing, nothing, query.shape[2], key.shape[2], nothing, nothing, nothing

# SPDX-License-Identifier: Apache-2.0
"""Kind of a call: what its launches follow from, which is all that it shows without its tensors'
values."""

from __future__ import annotations

import functools
from ast import literal_eval
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import CheckedCall
from ..head_settings import SettingsFacts
from ..kernels.params import TensorView
from ..order.grid import OrderFacts
from ..policy import PolicyFacts
from .workspace import CallShape

_DTYPE_IDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_CHUNK = 16  # bytes of a vector load


class CallTensors(NamedTuple):
    """Tensors that kernels read of a call, q (B, H, Nq, D), k and v (B, Hkv, Nk, D), or as its
    layout has them; others by the names of parameters in ``csrc/params.cuh``, None where a call has
    none. Kernels add to `counters`."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_lengths: Tensor | None = None
    block_mask: Tensor | None = None
    thresholds: Tensor | None = None
    slot_token: Tensor | None = None
    slot_counts: Tensor | None = None
    keys_exact: Tensor | None = None
    queries_exact: Tensor | None = None
    head_order_kind: Tensor | None = None
    counters: Tensor | None = None

    def heads(self, first: int, last: int) -> CallTensors:
        """Tensors (B, H, N, D) of the KV heads first .. last - 1 and of the query heads that read
        them."""
        group = self.q.shape[1] // self.k.shape[1]
        kv, query = slice(first, last), slice(first * group, last * group)
        changed = {"q": self.q[:, query], "k": self.k[:, kv], "v": self.v[:, kv]}
        if self.block_mask is not None:
            changed["block_mask"] = self.block_mask[:, query]
        if self.thresholds is not None:
            changed["thresholds"] = self.thresholds[query]
        if self.head_order_kind is not None:
            changed["head_order_kind"] = self.head_order_kind[query]
        return self._replace(**changed)


class CallRules(NamedTuple):
    """Rules of a call: all that it asks for beside its tensors."""

    policy: PolicyFacts
    settings: SettingsFacts | None
    order: OrderFacts | None
    causal: bool
    attention_sink: bool
    out_layout: str
    out_dtype: torch.dtype
    with_lse: bool
    exact_prefix: int
    exact_suffix: int
    scale: float

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, text: str, exact_prefix: int, exact_suffix: int, scale: float) -> CallRules:
        """text: as `rules_text` writes it."""
        values = literal_eval(text.replace("inf", "1e999"))
        policy, settings, order, causal, sink, out_layout, out_dtype, with_lse = values
        return cls(
            PolicyFacts(*policy),
            None if settings is None else SettingsFacts(*settings),
            None if order is None else OrderFacts(*order),
            causal,
            sink,
            out_layout,
            getattr(torch, out_dtype.removeprefix("torch.")),
            with_lse,
            exact_prefix,
            exact_suffix,
            scale,
        )


def rules_text(call: CheckedCall) -> str:
    """Rules of a call as text, which a graph of torch.compile holds, and other processes that load
    it read: all but its scale and its exact tokens, which may be symbols there."""
    settings = None if call.head_settings is None else call.head_settings.facts
    order = None if call.order is None else call.order.facts
    dtype = str(call.out_dtype)
    flags = f"{call.causal}, {call.attention_sink}"
    rest = f"{flags}, {call.out_layout!r}, {dtype!r}, {call.with_lse}"
    return f"({call.policy.facts}, {settings}, {order}, {rest})"


def result_size(layout: str, size: Sequence[int]) -> tuple[int, ...]:
    """Size of a result in `layout`, for q of size (B, H, Nq, D)."""
    batch, heads, queries, channels = size
    if layout == "HND":
        return batch, heads, queries, channels
    return batch, queries, heads, channels


class TensorFacts(NamedTuple):
    """Facts of a tensor (B, H, N, D), with a contiguous last dimension, but its address."""

    strides: tuple[int, ...]
    """Strides of batch entries, heads and tokens, in elements."""
    dtype: torch.dtype
    vectorized: bool
    """Whether every row starts at a multiple of 16 bytes; then those of groups of heads do, too."""

    @classmethod
    def of(cls, tensor: Tensor) -> TensorFacts:
        strides, size = tensor.stride()[:3], tensor.element_size()
        places = (tensor.data_ptr(), *(size * stride for stride in strides))
        return cls(strides, tensor.dtype, not any(place % _CHUNK for place in places))

    def view(self, address: int) -> Any:
        """`TensorView` of a tensor there."""
        return TensorView(address, *self.strides, _DTYPE_IDS[self.dtype], self.vectorized)


class CallKind(NamedTuple):
    """Facts that the launches of a call follow from, on a GPU that is known."""

    rules: CallRules
    device: torch.device
    shape: CallShape
    query_tokens: int
    key_tokens: int
    q: TensorFacts
    k: TensorFacts
    v: TensorFacts
    out: TensorFacts
    mask_strides: tuple[int, ...] | None
    given: frozenset[str]
    """Names of the tensors that are not None."""

    @classmethod
    def of(cls, tensors: CallTensors, rules: CallRules) -> CallKind:
        """Kind of a call of tensors (B, H, N, D)."""
        q, k, v, mask = tensors.q, tensors.k, tensors.v, tensors.block_mask
        out = torch.empty(
            result_size(rules.out_layout, q.shape), dtype=rules.out_dtype, device="meta"
        )
        return cls(
            rules,
            q.device,
            CallShape.of(q, k, None if rules.order is None else rules.order.slots),
            q.shape[2],
            k.shape[2],
            TensorFacts.of(q),
            TensorFacts.of(k),
            TensorFacts.of(v),
            TensorFacts.of(out if rules.out_layout == "HND" else out.transpose(1, 2)),
            None if mask is None else mask.stride(),
            frozenset(name for name, x in tensors._asdict().items() if x is not None),
        )

    def of_heads(self, kv_heads: int) -> CallKind:
        """Same kind, of so many KV heads."""
        heads = self.shape.heads // self.shape.kv_heads * kv_heads
        return self._replace(shape=self.shape._replace(heads=heads, kv_heads=kv_heads))


def key_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    block_mask: Tensor | None,
    counters: Tensor | None,
    *arguments: Hashable,
) -> Hashable:
    """Key of a kind of calls: all that checks and launches read of it, as a plain tuple, which C
    hashes. arguments: those that are no tensors, policies, orders and settings as their `facts`."""
    return (
        arguments,
        *(q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % _CHUNK),
        *(k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % _CHUNK),
        *(v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % _CHUNK),
        key_lengths is not None
        and (key_lengths.shape, key_lengths.stride(), key_lengths.dtype, key_lengths.device),
        block_mask is not None
        and (block_mask.shape, block_mask.stride(), block_mask.dtype, block_mask.device),
        counters is not None and (counters.shape, counters.dtype, counters.device),
    )

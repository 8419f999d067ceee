# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in place of `torch.nn.functional.scaled_dot_product_attention`.

with sparge.sdpa(sparge.SparsePolicy(topk=0.3)) as stats:
    out = model(x)
print(stats)  # sparse calls, their density, and why the others stayed exact
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from .attention import attention
from .checks.argument import check_kind, shown, whole_number
from .compiling import keep_to_graphs
from .head_settings import HeadSettings
from .order.grid import TokenOrder
from .padding import torch_mask_padding
from .policy import PerHead, SparsePolicy, with_topk
from .stats import CallStats, count_exact, opened
from .torch_attention import (
    NO_KERNEL,
    TORCH_ATTENTION,
    TorchCall,
    as_autocast,
    give_up,
    why_exact,
)

#: Calls of fewer queries or keys stay exact: there is little to gain, and text is among them.
MIN_TOKENS = 4096
#: Half of the key blocks and the first one, on which causal models lean.
DEFAULT_POLICY = SparsePolicy(attention_sink=True)
INTERLEAVED = (
    "Another context was opened in this one and outlived it, as in a generator: calls in both were "
    "served and counted by the one that was opened last."
)
BY_RULE = "the rule of the caller keeps it exact"
PADDED = "padding, beside blocks that a rule names: they are of keys that nobody cuts off"


class RuleOptions(TypedDict, total=False):
    """Keywords of `sparge.attention` that a rule gives."""

    policy: SparsePolicy | None
    order: TokenOrder | None
    block_mask: Tensor | None
    head_settings: HeadSettings | None


#: Rule of a caller: what is kept of a call that may be sparse; None keeps it exact.
Rule = Callable[[TorchCall], RuleOptions | SparsePolicy | None]
Keep = SparsePolicy | Rule | None
_RULED = tuple(RuleOptions.__annotations__)


def options_of(policy: SparsePolicy | Rule, call: TorchCall) -> RuleOptions | None:
    """Keywords of `attention` that a policy or a rule gives for a call; None keeps it exact."""
    found = policy if isinstance(policy, SparsePolicy) else policy(call)
    if isinstance(found, SparsePolicy):
        return {"policy": found}
    if found is None or (isinstance(found, dict) and all(name in _RULED for name in found)):
        return found
    given = ", ".join(map(str, found)) if isinstance(found, dict) else shown(found)
    raise ValueError(
        f"The rule gave {given}; it gives None (the call stays exact), a SparsePolicy, or a dict "
        f"of {', '.join(_RULED)}, as attention takes them."
    )


def sdpa(
    policy: Keep = None, min_tokens: int = MIN_TOKENS, *, topk: PerHead | None = None
) -> SdpaMode:
    """Context in which calls of `scaled_dot_product_attention` are sparse where they can be, in any
    model and also in graphs of torch.compile. Others are torch's own, unchanged.

    `with` gives the `CallStats`: how many calls were sparse, their density, and why the others
    stayed exact. Sparse are calls of at least `min_tokens` queries and keys, causal ones and
    those with padding masks among them; not those with other masks, dropout or gradients. A row
    of bools is read by the GPU in each call; other masks are read by the host, which waits for
    the GPU, each time unless PyTorch says that the same object was not changed.

    policy: what to keep; without it half of the key blocks, and always the first. Or a rule: it is
        given each call that may be sparse, a `TorchCall`, and gives a policy, `RuleOptions`, or
        None for a call that stays exact.
    topk: in place of a policy; the first block is kept beside it.
    """
    return SdpaMode(Substitute.checked(policy, min_tokens, CallStats(of_context=True), topk))


def sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    policy: Keep = None,
    topk: PerHead | None = None,
    min_tokens: int = MIN_TOKENS,
    stats: CallStats | None = None,
) -> Tensor:
    """Attention with the arguments and the meaning of `scaled_dot_product_attention`, sparse or
    torch's own by the rules of `sdpa`. Where a function is replaced by it, `functools.partial`
    gives the last three.
    """
    rules = Substitute.checked(policy, min_tokens, stats, topk)
    call = TorchCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    out = rules.sparse(call)
    return call.exact() if out is None else out


@dataclass(frozen=True, eq=False)
class Substitute:
    """What stands in for torch's attention, for calls that it can serve."""

    policy: SparsePolicy | Rule
    min_tokens: int
    stats: CallStats | None

    @classmethod
    def checked(
        cls, policy: Keep, min_tokens: int, stats: CallStats | None, topk: PerHead | None = None
    ) -> Substitute:
        if topk is not None:
            policy = with_topk(DEFAULT_POLICY, topk, {"policy": policy})
        policy = DEFAULT_POLICY if policy is None else policy
        if isinstance(policy, type) or not callable(policy):
            check_kind("policy", policy, SparsePolicy, "a SparsePolicy, or a function of a call")
        if stats is not None:
            check_kind("stats", stats, CallStats, "a sparge.CallStats()")
        return cls(policy, whole_number("min_tokens", min_tokens, 0), stats)

    def sparse(self, call: TorchCall) -> Tensor | None:
        """Sparse result, or None for a call that stays torch's, whose reason was counted."""
        why = why_exact(call, self.min_tokens)
        options = None if why else options_of(self.policy, call)
        padded = call.attn_mask is not None
        if options is None or (padded and ("order" in options or "block_mask" in options)):
            count_exact(self.stats, why or (BY_RULE if options is None else PADDED))
            return None
        try:
            return self._attend(call, options)
        except ValueError as error:
            # A sentence with sizes cannot be made where a graph leaves them open.
            traced = torch.compiler.is_compiling()
            why = "sparge.attention refused it" if traced else str(error)
        except NO_KERNEL as error:
            why = give_up(call.query.device, error)
        count_exact(self.stats, why)
        return None

    def _attend(self, call: TorchCall, options: RuleOptions) -> Tensor:
        query, key, value, lengths = *call[:3], None
        if call.attn_mask is not None:
            key, value, lengths = torch_mask_padding(call.attn_mask).apply(key, value)
        query, key, value = (as_autocast(x) for x in (query, key, value))
        tokens_first = query.stride(1) < query.stride(2)  # so that transposing it back is free
        out = attention(
            query,
            key,
            value,
            out_layout="NHD" if tokens_first else "HND",
            causal="top-left" if call.is_causal else None,
            scale=call.scale,
            key_lengths=lengths,
            stats=None if self.stats is None else self.stats.on(query.device),
            **options,
        )
        return out.transpose(1, 2) if tokens_first else out


class AttentionMode(TorchFunctionMode):
    """Context in which a function of ours stands in for `scaled_dot_product_attention`."""

    def __init__(self, serve: Callable[..., Tensor | None]) -> None:
        """serve: takes the arguments of a call; gives None for one that stays torch's."""
        super().__init__()
        self._serve = serve
        keep_to_graphs(AttentionMode.__torch_function__)

    def note_hidden(self) -> None:
        """Takes note of a call of torch.nn.MultiheadAttention, which hides its attention."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # torch takes the mode off meanwhile, so nothing that is called here comes back to it.
        kwargs = kwargs or {}
        if func is TORCH_ATTENTION:
            out = self._serve(*args, **kwargs)
            if out is not None:
                return out
        elif func is torch.nn.functional.multi_head_attention_forward:
            self.note_hidden()
        elif func is Tensor.unflatten:  # Dynamo knows its name, but does not trace its super()
            return args[0].unflatten(*args[1:], **kwargs)
        return func(*args, **kwargs)


class SdpaMode(AttentionMode):
    """Context that `sdpa` makes.

    PyTorch keeps one stack of modes for each thread. So it has those of other tasks too, and of
    generators, which may end in any order: each acts for the code that it is open in.
    """

    def __init__(self, substitute: Substitute) -> None:
        super().__init__(self._sparse_here)
        self._substitute = substitute
        assert substitute.stats is not None  # sdpa made them
        self._stats = substitute.stats
        self._entered = 0  # less what another thread ended, as when it collects a generator

    def note_hidden(self) -> None:
        if self._entered and _is_open_here(self._stats):
            count_exact(self._stats, "torch.nn.MultiheadAttention, which hides its call")

    def _sparse_here(self, *args: Any, **kwargs: Any) -> Tensor | None:
        if self._entered and _is_open_here(self._stats):
            return self._substitute.sparse(TorchCall(*args, **kwargs))
        return None

    def __enter__(self) -> CallStats:
        self._stats.prepare()  # before it is on, for what fails here is not taken off again
        super().__enter__()
        opened.set((*opened.get(), self._stats))
        self._entered += 1
        return self._stats

    def __exit__(self, *raised: Any) -> None:
        contexts = opened.get()
        if self._stats in contexts:
            place = len(contexts) - 1 - contexts[::-1].index(self._stats)
            inner = contexts[place + 1 :]
            opened.set(contexts[:place] + inner)
            for each in (self._stats, *inner) if inner else ():
                each.remark = INTERLEAVED
        self._entered -= 1
        _take_off(self)


def _is_open_here(stats: CallStats) -> bool:
    # torch.compile cannot trace the question: a graph goes by the context that was opened last.
    return torch.compiler.is_compiling() or stats in opened.get()


def _take_off(mode: TorchFunctionMode) -> None:
    """Takes a mode off the stack of this thread, wherever it lies."""
    above: list[Any] = []
    while _len_torch_function_stack():
        above.append(_pop_mode())
        if above[-1] is mode:
            above.pop()
            break
    for each in reversed(above):
        _push_mode(each)

# SPDX-License-Identifier: Apache-2.0
"""One validated attention call, and the part of it that some heads are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .errors import Unsupported
from .kernels import Element, capabilities, native_element
from .plan.blocks import BlockPlan
from .plan.budget import HeadBudget
from .plan.grid import TokenOrder
from .policy import Precision, SparsePolicy
from .validate import (
    as_heads_first,
    check_block_mask,
    check_inference,
    check_key_lengths,
    check_pair,
    check_scale,
    check_values,
)
from .workspace import CallShape


@dataclass(frozen=True, eq=False)
class Call:
    """q (B, H, Nq, D), k and v (B, Hkv, Nk, D); v is None where only a plan is made."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    policy: SparsePolicy
    scale: float
    is_causal: bool
    key_lengths: Tensor | None
    block_mask: Tensor | None
    plan: BlockPlan | None
    order: TokenOrder | None
    budget: HeadBudget | None
    thresholds: Tensor | None

    @property
    def shape(self) -> CallShape:
        return CallShape.of(self.q, self.k, None if self.order is None else self.order.slots)

    @property
    def pools(self) -> bool:
        """Whether dropped blocks may take part as their means."""
        return self.budget is not None and self.budget.pools

    @property
    def element(self) -> Element:
        return element_of(self.policy.precision, self.q)

    @property
    def routes(self) -> bool:
        """Whether there is room for query statistics: a given plan or mask replaces them."""
        return self.plan is None and self.block_mask is None

    @property
    def scores(self) -> bool:
        """Whether route asks what blocks are like: not where top-k keeps all, as far as the host
        knows, which does not read thresholds of heads."""
        policy = self.policy
        keeps_all = (
            self.thresholds is None
            and policy.select_by == "topk"
            and not isinstance(policy.topk, Tensor)
            and policy.topk >= 1
        )
        return self.routes and not keeps_all

    @property
    def asks_similarity(self) -> bool:
        """Whether some block may fail the gate of self-similarity, which is never below 0."""
        threshold = self.policy.simthreshd1
        return self.scores and (isinstance(threshold, Tensor) or float(threshold) >= 0)

    def heads(self, first: int, last: int) -> Call:
        """The kv heads first .. last - 1 and the query heads that read them."""
        group = self.shape.heads // self.shape.kv_heads
        kv, query = slice(first, last), slice(first * group, last * group)
        return replace(
            self,
            q=self.q[:, query],
            k=self.k[:, kv],
            v=None if self.v is None else self.v[:, kv],
            block_mask=None if self.block_mask is None else self.block_mask[:, query],
            plan=None if self.plan is None else self.plan.heads_slice(query),
            budget=None if self.budget is None else self.budget.heads_slice(query),
            thresholds=None if self.thresholds is None else self.thresholds[query],
        )


def element_of(precision: Precision, q: Tensor) -> Element:
    """The operand types that ``precision`` means on q's device."""
    if precision is Precision.INT8_FP16:
        return Element.INT8_FP16
    sixteen_bit = precision is Precision.SIXTEEN_BIT
    return native_element(capabilities(q.device).arch, sixteen_bit, q.dtype)


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    policy: SparsePolicy | None,
    layout: str,
    is_causal: bool,
    scale: float | None,
    key_lengths: Tensor | None,
    block_mask: Tensor | None,
    plan: BlockPlan | None,
    order: TokenOrder | None = None,
    budget: HeadBudget | None = None,
) -> Call:
    """Raises Unsupported or ValueError, with a sentence for the user, before anything runs."""
    policy = SparsePolicy() if policy is None else policy
    q, k = as_heads_first("q", q, layout), as_heads_first("k", k, layout)
    check_pair(q, k)
    check_inference(q, k)
    if v is not None:
        v = as_heads_first("v", v, layout)
        check_values(k, v)
        check_pair(q, v, "v")
        check_inference(v)
    check_key_lengths(key_lengths, q)
    check_block_mask(block_mask, q, k)
    replaces_routing = plan is not None or block_mask is not None
    _check_order_and_budget(q, k, policy, is_causal, replaces_routing, order, budget)
    softmax_scale = q.shape[-1] ** -0.5 if scale is None else scale
    check_scale(softmax_scale)
    if plan is not None:
        plan.check_fits(q, k, is_causal, key_lengths, block_mask)
        check_key_lengths(plan.key_lengths, q)
        is_causal, key_lengths = plan.is_causal, plan.key_lengths
    if block_mask is not None and block_mask.dtype not in (torch.bool, torch.uint8, torch.int8):
        block_mask = block_mask != 0
    return Call(
        q,
        k,
        v,
        policy,
        softmax_scale,
        is_causal,
        key_lengths,
        block_mask,
        plan,
        None if order is None else order.on(q.device),
        budget,
        policy.head_thresholds(q.shape[1], q.device) if budget is None else budget.table(policy),
    )


def _check_order_and_budget(
    q: Tensor,
    k: Tensor,
    policy: SparsePolicy,
    is_causal: bool,
    replaces_routing: bool,
    order: TokenOrder | None,
    budget: HeadBudget | None,
) -> None:
    if (order is not None or budget is not None) and replaces_routing:
        raise ValueError(
            "plan and block_mask replace routing, which order and budget are about: give one or "
            "the other."
        )
    if order is not None:
        if is_causal:
            raise Unsupported(
                "A token order and is_causal do not go together: blocks of an order hold tokens "
                "from before and after. Leave one of them out."
            )
        if q.shape[2] != order.tokens or k.shape[2] != order.tokens:
            raise Unsupported(
                f"The call has {q.shape[2]} queries and {k.shape[2]} keys; the token order is one "
                f"of {order.tokens} tokens that attend to each other. Make an order for this grid."
            )
    if budget is not None and budget.walk is not None and order is None:
        raise ValueError(
            "The budget says which walk of a token order each head takes, and no order is given: "
            "give order=grid_order(grid), or a budget without walk."
        )
    if budget is not None:
        _check_mean_terms(policy, budget, is_causal)
    if budget is not None and (budget.heads != q.shape[1] or budget.device != q.device):
        raise ValueError(
            f"The budget is for {budget.heads} heads on {budget.device}, q has {q.shape[1]} heads "
            f"on {q.device}: give one value for each head, on q's device."
        )


def _check_mean_terms(policy: SparsePolicy, budget: HeadBudget, is_causal: bool) -> None:
    for name in ("background", "contrast"):
        if getattr(budget, name) is None:
            continue
        if is_causal:
            reason = "its mean value would tell causal attention of later keys"
        elif policy.precision is Precision.SIXTEEN_BIT:
            reason = "16-bit operands do not know it, as they are not taken around a mean"
        elif name == "background" and not policy.smooth_k:
            reason = "it stands at the mean key, and smooth_k is False"
        else:
            continue
        raise Unsupported(f"The budget has a {name}, but {reason}: leave {name} out.")

# SPDX-License-Identifier: Apache-2.0
"""Call where no kernel runs: the reference with the same meaning, in float32, of what kernels would
read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import reference
from ..head_settings import HeadSettings
from ..order.grid import OrderFacts, TokenOrder
from ..policy import Precision, SparsePolicy
from ..stats import Counter
from ..thresholds import COLUMNS
from .as_written import as_written
from .kind import CallRules, CallTensors


def attend(
    tensors: CallTensors, rules: CallRules, token_slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Result (B, H, Nq, D) and log-sum-exps (B, H, Nq), float32; adds to the counters.

    token_slots: those of the token order.
    """
    columns: dict[str, Tensor] = {}
    if tensors.thresholds is not None:
        columns = dict(zip(COLUMNS, tensors.thresholds.unbind(1), strict=True))
    with as_written(tensors.q.device):
        attended, route = reference.attention(
            *tensors[:3],
            _policy(rules, columns),
            _settings(rules, columns, tensors.head_order_kind),
            order=_order(rules.order, tensors, token_slots),
            is_causal=rules.causal,
            scale=rules.scale,
            key_lengths=tensors.key_lengths,
            block_mask=tensors.block_mask,
        )
    if tensors.counters is not None:
        tensors.counters[Counter.KEPT] += route.kept_pairs().sum()
        tensors.counters[Counter.VALID] += route.valid_pairs().sum()
        tensors.counters[Counter.PV_SKIPPED] += attended.pv_skipped.sum()
        tensors.counters[Counter.KEPT_BLOCKS] += route.kept_blocks().sum()
    return attended.out, attended.lse.contiguous()


def _policy(rules: CallRules, columns: dict[str, Tensor]) -> SparsePolicy:
    """Policy with the thresholds of each head where there are such."""
    values: dict[str, Any] = {
        name: 1.0 if value is None else value for name, value in rules.policy._asdict().items()
    }
    values["precision"] = Precision(rules.policy.precision)
    if columns:
        own = "topk" if rules.policy.select_by == "topk" else "cdfthreshd"
        values[own] = columns["selection"]
        values |= {name: columns[name] for name in ("simthreshd1", "pvthreshd")}
    names = ("attention_sink", "exact_prefix", "exact_suffix")
    return SparsePolicy(**values, **{name: getattr(rules, name) for name in names})


def _settings(
    rules: CallRules, columns: dict[str, Tensor], order_kind: Tensor | None
) -> HeadSettings | None:
    facts = rules.settings
    if facts is None:
        return None
    return HeadSettings(
        columns["selection"],
        columns["log2_pool_weight"].exp2(),
        columns["router"].int(),
        facts.pools,
        order_kind,
        columns["output_scale"] if facts.has_output_scale else None,
    )


def _order(
    facts: OrderFacts | None, tensors: CallTensors, token_slots: Tensor | None
) -> TokenOrder | None:
    """Token order without its segments."""
    if facts is None:
        return None
    slots, counts = tensors.slot_token, tensors.slot_counts
    keys_exact, queries_exact = tensors.keys_exact, tensors.queries_exact
    assert slots is not None and token_slots is not None and counts is not None
    assert keys_exact is not None and queries_exact is not None
    return TokenOrder(slots, token_slots, counts, keys_exact, queries_exact, facts.least_keys)

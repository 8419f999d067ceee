# SPDX-License-Identifier: Apache-2.0
"""Call where no kernel runs: the reference with the same meaning, slow."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import reference
from ..blocks import BlockPlan
from ..call import Call
from ..stats import Counter
from .as_written import as_written


def make_plan(call: Call) -> BlockPlan:
    with as_written(call.q.device):
        return reference.make_plan(
            call.q, call.k, call.policy, block_mask=call.block_mask, **_pairs(call)
        )


def attend(call: Call) -> tuple[reference.Attended, BlockPlan]:
    """Attends in a call without order and head settings; returns the plan that was used as well."""
    assert call.v is not None  # None only where a plan alone is made
    options = {"block_mask": call.block_mask, "plan": call.plan, **_pairs(call)}
    with as_written(call.q.device):
        return reference.attention(call.q, call.k, call.v, call.policy, **options)


def _attend_in_order(call: Call) -> tuple[reference.Attended, reference.Choice]:
    """Attends in a call with an order or head settings; returns the blocks that it chose as
    well.
    """
    assert call.v is not None
    with as_written(call.q.device):
        return reference.budgeted_attention(
            call.q,
            call.k,
            call.v,
            call.policy,
            call.head_settings,
            order=call.order,
            **_pairs(call),
        )


def _pairs(call: Call) -> dict[str, Any]:
    """Arguments that say which queries see which keys, and by what scale."""
    return {
        "is_causal": call.is_causal,
        "scale": call.scale,
        "key_lengths": call.key_lengths,
    }


def run(call: Call, out: Tensor, lse: Tensor | None, counters: Tensor | None) -> None:
    """Writes the results that the kernels would write, and adds to the counters of
    `AttentionStats`."""
    if call.order is None and call.head_settings is None:
        attended, plan = attend(call)
        kept, valid, blocks = plan.kept_pairs(), plan.valid_pairs(), plan.visited_blocks()
    else:
        attended, choice = _attend_in_order(call)
        kept, valid, blocks = choice.kept_pairs(), choice.valid_pairs(), choice.kept
    out.copy_(attended.out)
    if lse is not None:
        lse.copy_(attended.lse)
    if counters is not None:
        counters[Counter.KEPT] += kept.sum()
        counters[Counter.VALID] += valid.sum()
        counters[Counter.PV_SKIPPED] += attended.pv_skipped.sum()
        counters[Counter.KEPT_BLOCKS] += blocks.sum()

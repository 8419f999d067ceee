# SPDX-License-Identifier: Apache-2.0
"""A call where no kernel runs: the reference with the same meaning, slow."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .call import Call
from .plan.blocks import BlockPlan
from .stats import Counter


def attend(call: Call) -> tuple[reference.Attended, BlockPlan]:
    """A call without order and budget, and the plan that was used."""
    assert call.v is not None  # None only where a plan alone is made
    return reference.attention(
        call.q,
        call.k,
        call.v,
        call.policy,
        is_causal=call.is_causal,
        scale=call.scale,
        key_lengths=call.key_lengths,
        block_mask=call.block_mask,
        plan=call.plan,
    )


def run(call: Call, out: Tensor, lse: Tensor | None, counters: Tensor | None) -> None:
    """Writes what the kernels would write, and adds to the counters of `AttentionStats`."""
    if call.order is None and call.budget is None:
        attended, plan = attend(call)
        kept, valid, blocks = plan.kept_pairs(), plan.valid_pairs(), plan.visited_blocks()
    else:
        assert call.v is not None
        attended, choice = reference.budgeted_attention(
            call.q,
            call.k,
            call.v,
            call.policy,
            call.budget,
            order=call.order,
            is_causal=call.is_causal,
            scale=call.scale,
            key_lengths=call.key_lengths,
        )
        kept, valid, blocks = choice.kept_pairs(), choice.valid_pairs(), choice.kept
    out.copy_(attended.out)
    if lse is not None:
        lse.copy_(attended.lse)
    if counters is not None:
        counters[Counter.KEPT] += kept.sum()
        counters[Counter.VALID] += valid.sum()
        counters[Counter.PV_SKIPPED] += attended.pv_skipped.sum()
        counters[Counter.KEPT_BLOCKS] += blocks.sum()

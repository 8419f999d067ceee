# SPDX-License-Identifier: Apache-2.0
"""Budgets per head against the rules spelt out one query block at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sparge.blocks import STEP_BLOCKS, whole_steps
from sparge.head_settings import HeadBudget, Router
from sparge.order.grid import TokenGrid, TokenOrder, cube_order
from sparge.policy import SparsePolicy
from sparge.reference import quantize_qkv, route
from sparge.reference.choose import (
    choose_blocks,
    error_scores,
    mass_scores,
)
from sparge.reference.packed import Packed, pack_qkv
from tests.reference.dense import blocks_of

SCALE = 0.25
GRID = TokenGrid(5, 9, 13, prefix=70, suffix=85, lead_frames=1)
CUBES = cube_order(GRID)
LENGTHS = torch.tensor([GRID.tokens, GRID.tokens - 80], dtype=torch.int32)
BUDGET = HeadBudget(
    torch.tensor([0.3, 0.1, 0.2, 0.45]),
    torch.tensor([1.0, 0.0, 0.4, 2.5]),
    torch.tensor([Router.MASS, Router.ERROR, Router.ERROR, Router.ERROR], dtype=torch.int32),
)


def case(make_qkv, order: TokenOrder | None) -> Packed:
    # Correlated neighbours: block means differ, and variances too.
    q, k, v = make_qkv(2, 4, GRID.tokens, 16, kv_heads=2, dtype=torch.float32)
    q, k, v = (x + x.cumsum(2) / 20 for x in (q, k, v))
    return pack_qkv(q, k, v, order, key_lengths=LENGTHS)


def block_errors(x: Packed, b: int, h: int, i: int, valid: list[int]) -> dict[int, float]:
    """The error of each valid block, as a share of the row's pooled mass, in Python floats."""
    operands, kv = x.operands, h // 2
    q = operands.q_block_mean[b, h, i].double()
    mass = {
        j: int(operands.key_counts[b, j])
        * math.exp(float(q @ operands.k_block_mean[b, kv, j].double()) * SCALE)
        for j in valid
    }
    total = sum(mass.values())
    value = {j: x.v_block_mean[b, kv, j].bfloat16().double() for j in valid}
    output = sum(mass[j] / total * value[j] for j in valid)
    errors: dict[int, float] = {}
    for j in valid:
        logit_variance = sum(
            float(c) ** 2 * float(s) * SCALE**2
            for c, s in zip(q, x.k_variance[b, kv, j].bfloat16(), strict=True)
        )
        distance = float((value[j] - output).square().sum())
        bias = (logit_variance / 2) ** 2 * distance
        scatter = logit_variance / 64 * float(x.v_variance[b, kv, j])
        errors[j] = mass[j] / total * math.exp(logit_variance / 2) * math.sqrt(bias + scatter)
    return errors


def naive_choice(
    x: Packed, policy: SparsePolicy, budget: HeadBudget, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """kept and pooled, by plain loops and Python's sort."""
    operands, order = x.operands, x.order
    shape = (2, 4, operands.q_block_mean.shape[2], operands.k_block_mean.shape[2])
    kept, pooled = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    keys, queries = blocks_of(order, GRID.tokens, 64), blocks_of(order, GRID.tokens, 128)
    grid_start, grid_end = GRID.prefix, GRID.tokens - GRID.suffix
    for b in range(2):
        for h in range(4):
            for i, rows in enumerate(queries):
                count = operands.key_counts[b].tolist()
                first, last = 128 * i, min(128 * i + 127, operands.n_queries - 1)
                valid = [
                    j for j in range(shape[3]) if count[j] and not (is_causal and 64 * j > last)
                ]
                forced = {j for j in valid if is_causal and 64 * j + 63 >= first}
                if policy.attention_sink:
                    forced |= {0} & set(valid)
                if order is not None:
                    sinks = range(grid_start, grid_start + GRID.frame_tokens)
                    text = {t for t in range(GRID.tokens) if not grid_start <= t < grid_end}
                    forced |= {j for j in valid if {*keys[j]} & {*sinks, *text}}
                    dense = bool({*rows} & text)
                else:
                    dense = False
                errors = block_errors(x, b, h, i, valid)
                if int(budget.router[h]) == Router.MASS:
                    q = operands.q_block_mean[b, h, i]
                    weight = {
                        j: count[j] * math.exp(float(q @ operands.k_block_mean[b, h // 2, j]) / 4)
                        for j in valid
                    }
                else:
                    weight = errors
                ranked = sorted(set(valid) - forced, key=lambda j, w=weight: (-w[j], j))
                share = float(budget.density[h])
                if policy.select_by == "topk":
                    number = max(budget.floor, int(share * shape[3]))
                    number += (number + len(forced)) % 2
                else:
                    so_far, number = 0.0, 0
                    for j in ranked:
                        so_far += weight[j]
                        if so_far > share * sum(weight[j] for j in ranked):
                            break
                        number += 1
                chosen = valid if dense else [*forced, *ranked[: max(budget.floor, number)]]
                kept[b, h, i, chosen] = True
                if budget.gain[h] > 0:
                    past = [j for j in valid if not is_causal or 64 * j + 63 < first]
                    pooled[b, h, i, [j for j in past if j not in chosen]] = True
    return kept, pooled


@pytest.mark.parametrize(
    "policy",
    [
        SparsePolicy(),
        SparsePolicy(select_by="cdf"),
        SparsePolicy(attention_sink=True),
    ],
    ids=["topk", "cdf", "sink"],
)
@pytest.mark.parametrize("floor", [1, 3])
@pytest.mark.parametrize(
    ("order", "is_causal"),
    [(None, False), (None, True), (CUBES, False)],
    ids=["as they come", "causal", "cubes"],
)
def test_choice_is_the_naive_one(
    make_qkv, order: TokenOrder | None, is_causal: bool, policy: SparsePolicy, floor: int
) -> None:
    x = case(make_qkv, order)
    budget = HeadBudget(BUDGET.density, BUDGET.gain, BUDGET.router, floor)
    choice = choose_blocks(x, policy, budget, scale=SCALE, is_causal=is_causal)
    kept, pooled = naive_choice(x, policy, budget, is_causal)
    assert torch.equal(choice.kept, kept)
    assert torch.equal(choice.pooled, pooled)
    assert pooled[:, [0, 2, 3]].any() and not pooled[:, 1].any()
    assert not (choice.pooled & choice.kept).any()
    assert not (choice.kept & ~choice.valid).any()


@pytest.mark.parametrize("order", [None, CUBES], ids=["as they come", "cubes"])
def test_error_scores_are_the_formula(make_qkv, order: TokenOrder | None) -> None:
    x = case(make_qkv, order)
    choice = choose_blocks(x, SparsePolicy(), BUDGET, scale=SCALE)
    scores = error_scores(x, SCALE, choice.valid)
    mass = mass_scores(x, SCALE).masked_fill(~choice.valid, -torch.inf)
    share = (scores - mass.logsumexp(-1, keepdim=True)).exp()
    for b, h, i in [(0, 0, 0), (0, 3, 2), (1, 1, 4), (1, 2, 1)]:
        valid = choice.valid[b, h, i].nonzero().flatten().tolist()
        expected = block_errors(x, b, h, i, valid)
        found = share[b, h, i, valid].double()
        assert torch.allclose(found, torch.tensor([*expected.values()]).double(), rtol=1e-3)
    assert (scores[~choice.valid] == -torch.inf).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        SparsePolicy(topk=0.3),
        SparsePolicy(topk=0.3, simthreshd1=0.1, attention_sink=True),
        SparsePolicy(topk=0.2, exact_prefix=70, keep_diagonal=False),
        SparsePolicy(select_by="cdf", cdfthreshd=0.5, exact_suffix=130),
    ],
    ids=["topk", "gate and sink", "prefix", "cdf"],
)
def test_mass_in_raster_order_is_the_existing_route(
    make_qkv, policy: SparsePolicy, is_causal: bool
) -> None:
    """Full blocks are equal, bit for bit: upstream's semantics stay what they are."""
    q, k, v = make_qkv(2, 4, 700, 16, kv_heads=2, kv_tokens=1024, dtype=torch.float32)
    q, k = (x + x.cumsum(2) / 30 for x in (q, k))
    lengths = torch.tensor([1024, 640], dtype=torch.int32)
    plan = route(
        quantize_qkv(q, k, v, key_lengths=lengths), policy, scale=SCALE, is_causal=is_causal
    )
    packed = pack_qkv(q, k, v, key_lengths=lengths)
    by_policy = choose_blocks(packed, policy, None, scale=SCALE, is_causal=is_causal)
    assert torch.equal(by_policy.kept, plan.kept()) and not by_policy.pooled.any()
    assert torch.equal(by_policy.kept_pairs(), plan.kept_pairs())
    assert torch.equal(by_policy.valid_pairs(), plan.valid_pairs())
    budget = HeadBudget.uniform(4, float(policy.selection))
    choice = choose_blocks(packed, policy, budget, scale=SCALE, is_causal=is_causal)
    more = choice.kept.sum(-1) - plan.kept().sum(-1)
    missing = (choice.valid & ~plan.kept()).any(-1)
    assert not (plan.kept() & ~choice.kept).any()
    counts_on = policy.select_by == "topk"
    assert (more == plan.kept().sum(-1) % STEP_BLOCKS * counts_on * missing).all()


def test_ranks_number_the_ranked_blocks(make_qkv) -> None:
    x = case(make_qkv, CUBES)
    choice = choose_blocks(x, SparsePolicy(), BUDGET, scale=SCALE)
    forced = CUBES.keys_exact | (x.operands.key_counts == 0)[:, None, None]
    assert torch.equal(choice.rank == -1, forced.expand_as(choice.rank))
    for ranks in choice.rank.flatten(0, 2):
        ranked = ranks[ranks >= 0].sort().values
        assert torch.equal(ranked, torch.arange(len(ranked)))
    grid_rows = ~CUBES.queries_exact
    chosen = (choice.kept & (choice.rank >= 0)).sum(-1)[:, :, grid_rows]
    asked = (BUDGET.density * CUBES.key_blocks).long()[:, None]
    assert ((chosen == asked) | (chosen == asked + 1)).all()


def test_lists_with_a_budget_or_an_order_make_whole_steps(make_qkv) -> None:
    """But for those that keep all that there is, as where text or a gate forces it."""
    x = case(make_qkv, CUBES)
    for budget in (BUDGET, None):
        choice = choose_blocks(x, SparsePolicy(topk=0.3), budget, scale=SCALE)
        kept, valid = choice.kept.sum(-1), choice.valid.sum(-1)
        assert ((kept % STEP_BLOCKS == 0) | (kept == valid)).all()
        assert (kept < valid).any(-1).all()
    asked, forced = torch.arange(9), torch.tensor([[0], [1], [4]])
    total = whole_steps(asked, forced) + forced
    assert (total % STEP_BLOCKS == 0).all() and (total - asked - forced).unique().tolist() == [0, 1]


def test_pairs_count_tokens_and_not_slots(make_qkv) -> None:
    choice = choose_blocks(case(make_qkv, CUBES), SparsePolicy(), BUDGET, scale=SCALE)
    everything = replace(choice, kept=torch.ones_like(choice.kept))
    valid = everything.valid_pairs()
    assert torch.equal(everything.kept_pairs(), valid)
    assert valid.tolist() == [[GRID.tokens * length] * 4 for length in LENGTHS.tolist()]
    kept = replace(choice, kept=everything.kept & CUBES.keys_exact).kept_pairs()
    exact = GRID.prefix + GRID.frame_tokens
    assert kept[:, 0].tolist() == [GRID.tokens * (exact + cut) for cut in (85, 5)]


def test_a_block_without_error_is_ranked_last(make_qkv) -> None:
    """One key repeated 64 times has nothing that its mean lacks."""
    q, k, v = make_qkv(1, 1, 128, 16, kv_tokens=512)
    k[:, :, 128:192] = 3 * q.mean(2, keepdim=True)  # the block with the most mass
    packed = pack_qkv(q, k, v, smooth_k=False)
    for router, place in ((Router.MASS, 0), (Router.ERROR, 7)):
        budget = HeadBudget.uniform(1, 0.3, gain=1.0, router=router)
        choice = choose_blocks(packed, SparsePolicy(), budget, scale=1.0)
        assert int(choice.rank[0, 0, 0, 2]) == place

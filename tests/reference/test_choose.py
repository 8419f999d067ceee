# SPDX-License-Identifier: Apache-2.0
"""Choice of blocks where a float64 oracle cannot tell: bits, ranks and scores."""

from __future__ import annotations

import pytest
import torch

from sparge.blocks import STEP_BLOCKS, whole_steps
from sparge.head_settings import HeadSettings, Router
from sparge.order.grid import TokenGrid, TokenOrder, cube_order
from sparge.policy import SparsePolicy
from sparge.reference import quantize_qkv, route
from sparge.reference.choose import choose_blocks, error_scores, mass_scores
from sparge.reference.packed import Packed, pack_qkv

SCALE = 0.25
GRID = TokenGrid(5, 9, 13, prefix=70, suffix=85, lead_frames=1)
CUBES = cube_order(GRID)
LENGTHS = torch.tensor([GRID.tokens, GRID.tokens - 80], dtype=torch.int32)
BUDGET = HeadSettings(
    torch.tensor([0.3, 0.1, 0.2, 0.45]),
    torch.tensor([1.0, 0.0, 0.4, 2.5]),
    torch.tensor([Router.MASS, Router.ERROR, Router.ERROR, Router.ERROR], dtype=torch.int32),
)


def case(make_qkv, order: TokenOrder | None) -> Packed:
    # Correlated neighbours: block means differ, and variances too.
    q, k, v = make_qkv(2, 4, GRID.tokens, 16, kv_heads=2, dtype=torch.float32)
    q, k, v = (x + x.cumsum(2) / 20 for x in (q, k, v))
    return pack_qkv(q, k, v, order, key_lengths=LENGTHS)


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
    head_settings = HeadSettings.uniform(4, float(policy.selection))
    choice = choose_blocks(packed, policy, head_settings, scale=SCALE, is_causal=is_causal)
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
    for head_settings in (BUDGET, None):
        choice = choose_blocks(x, SparsePolicy(topk=0.3), head_settings, scale=SCALE)
        kept, valid = choice.kept.sum(-1), choice.valid.sum(-1)
        assert ((kept % STEP_BLOCKS == 0) | (kept == valid)).all()
        assert (kept < valid).any(-1).all()
    asked, forced = torch.arange(9), torch.tensor([[0], [1], [4]])
    total = whole_steps(asked, forced) + forced
    assert (total % STEP_BLOCKS == 0).all() and (total - asked - forced).unique().tolist() == [0, 1]


@pytest.mark.parametrize("order", [None, CUBES], ids=["as they come", "cubes"])
def test_error_scores_are_the_formula(make_qkv, order: TokenOrder | None) -> None:
    """Spelt out for one query block of a head, in float64."""
    x = case(make_qkv, order)
    choice = choose_blocks(x, SparsePolicy(), BUDGET, scale=SCALE)
    scores = error_scores(x, SCALE, choice.valid)
    assert (scores[~choice.valid] == -torch.inf).all()
    mass = mass_scores(x, SCALE).masked_fill(~choice.valid, -torch.inf)
    share = (scores - mass.logsumexp(-1, keepdim=True)).exp()
    for b, h, i in [(0, 0, 0), (0, 3, 2), (1, 1, 4), (1, 2, 1)]:
        j, operands = choice.valid[b, h, i].nonzero().flatten(), x.operands
        q, counts = operands.q_block_mean[b, h, i].double(), operands.key_counts[b, j]
        weight = counts * (operands.k_block_mean[b, h // 2, j].double() @ q * SCALE).exp()
        weight = weight / weight.sum()
        values = x.v_block_mean[b, h // 2, j].bfloat16().double()
        s = x.k_variance[b, h // 2, j].bfloat16().double() @ (q * SCALE).square()
        distance = (values - weight @ values).square().sum(-1)
        spread = (s / 2).square() * distance + s / 64 * x.v_variance[b, h // 2, j]
        expected = weight * (s / 2).exp() * spread.sqrt()
        torch.testing.assert_close(share[b, h, i, j].double(), expected, rtol=1e-3, atol=0)

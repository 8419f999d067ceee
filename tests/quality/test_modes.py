# SPDX-License-Identifier: Apache-2.0
"""Each mode of the quality benchmark against the maths that it stands for."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from benchmarks.quality.judge import Call, Sample
from benchmarks.quality.modes import BY_NAME, Mode, attend, reached_density, share_for, uniform
from benchmarks.quality.perplexity import attention_of
from benchmarks.quality.study import emulated
from benchmarks.quality_data.layer import Layer
from sparge.blocks import KEY_BLOCK, QUERY_BLOCK
from sparge.common.metrics import rel_l2
from sparge.head_settings import HeadBudget
from sparge.kernels.spec import Element
from sparge.reference.choose import Choice
from sparge.reference.exact import exact_attention
from sparge.reference.exact_pooled import exact_pooled_attention

EIGHT_BITS = 0.02  # relative L2; rows with few keys do not average E4M3's steps of an eighth away
INT8_ALONE = 0.004  # without E4M3: what the design measured for INT8 QK, and FP16 V
SHARE = 0.3

every_mode = pytest.mark.parametrize("mode", BY_NAME.values(), ids=list(BY_NAME))


def run(call: Call, mode: Mode, budget: HeadBudget) -> tuple[Tensor, Choice]:
    """(heads, tokens, D) in token order, all of them."""
    packed = call.packed(mode.cubes)
    sample = Sample.of(packed, range(len(packed.query_counts)))
    out, _ = emulated(mode, call, budget, sample)
    _, choice = attend(mode, packed, budget, is_causal=call.is_causal)
    return torch.empty_like(out).index_copy_(1, sample.tokens, out), choice


def without_e4m3(call: Call, tokens: int | None = None) -> Call:
    """The first frames or `tokens` of a call, in an arithmetic that hides less."""
    layer = call.layer
    grid = layer.grid
    if grid is not None and tokens is not None:
        grid = replace(grid, frames=tokens // grid.frame_tokens)
        tokens = grid.tokens
    q, k, v = (x[:, :, :tokens] for x in (layer.q, layer.k, layer.v))
    return Call(Layer(layer.name, q, k, v, grid), call.is_causal, Element.INT8_FP16)


def blocks_of(call: Call, mode: Mode) -> tuple[Tensor, Tensor]:
    """The query block and the key block of each token."""
    order = call.packed(mode.cubes).order
    slot = torch.arange(call.layer.q.shape[2]) if order is None else order.token_slot.long()
    return slot // QUERY_BLOCK, slot // KEY_BLOCK


@every_mode
def test_all_blocks_kept_is_dense_attention(call: Call, mode: Mode) -> None:
    truth = call.truth(torch.arange(call.layer.q.shape[2]))
    dense, choice = run(call, mode, uniform(mode, call.heads, 1.0))
    assert torch.equal(choice.kept, choice.valid)
    assert rel_l2(dense, truth) < EIGHT_BITS
    sparse, _ = run(call, mode, uniform(mode, call.heads, 0.1))
    assert rel_l2(sparse, truth) > 2 * EIGHT_BITS, "dropping blocks changes the output"


def test_drop_is_a_top_k_of_pooled_scores_in_raster_order(video: Call) -> None:
    video, mode = without_e4m3(video), BY_NAME["drop"]
    out, choice = run(video, mode, uniform(mode, video.heads, SHARE))
    q, k, v = (x.float() for x in (video.layer.q, video.layer.k, video.layer.v))

    def means(rows: Tensor, size: int) -> Tensor:
        return torch.stack([part.mean(2) for part in rows.split(size, 2)], 2)

    scores = means(q, QUERY_BLOCK) @ means(k, KEY_BLOCK).transpose(2, 3)
    count = int(SHARE * scores.shape[-1])
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(-1, scores.topk(count).indices, True)
    assert torch.equal(choice.kept, kept)
    expected, _ = exact_pooled_attention(q, k, v, kept)
    assert rel_l2(out, expected[0]) < INT8_ALONE


@pytest.mark.parametrize("name", ["ours manual", "ours residual"])
def test_ours_is_its_blocks_and_their_pooled_terms_in_cube_order(call: Call, name: str) -> None:
    call, mode = without_e4m3(call), BY_NAME[name]
    budget = uniform(mode, call.heads, SHARE)
    out, choice = run(call, mode, budget)
    assert choice.pooled.any() == (mode.gain > 0)
    q, k, v = (x.float() for x in (call.layer.q, call.layer.k, call.layer.v))
    expected, _ = exact_pooled_attention(
        q,
        k,
        v,
        choice.kept,
        choice.pooled,
        budget.gain,
        order=call.cubes.order,
        is_causal=call.is_causal,
    )
    assert rel_l2(out, expected[0]) < INT8_ALONE
    assert choice.kept[..., 0].all(), "where the exact tokens are, or a text's first"


def sol_by_definition(call: Call, kept: Tensor, rows: range) -> Tensor:
    """(heads, rows, D): each dropped block as if every query were the mean of its block, of what
    the rows do not have in common: K less its mean."""
    query_block, key_block = blocks_of(call, BY_NAME["sol"])
    q, k, v = (x[0].double() for x in (call.layer.q, call.layer.k, call.layer.v))
    scale, out = q.shape[-1] ** -0.5, torch.zeros(len(q), len(rows), q.shape[-1])
    for head, (at, row) in product(range(len(q)), enumerate(rows)):
        keys, values = k[head * len(k) // len(q)], v[head * len(k) // len(q)]
        keys = keys - keys.mean(0)
        block = int(query_block[row])
        queries = (query_block == block).nonzero().flatten()
        weights, parts = [], []
        for j in range(kept.shape[-1]):
            members = (key_block == j).nonzero().flatten()
            if kept[0, head, block, j]:
                members = members[members <= row] if call.is_causal else members
                weights.append((keys[members] @ q[head, row] * scale).exp())
                parts.append(values[members])
            elif not call.is_causal or members[0] <= row:
                logit = keys[members].mean(0) @ q[head, queries].mean(0) * scale
                weights.append((len(members) * logit.exp()).reshape(1))
                parts.append(values[members].mean(0, keepdim=True))
        weight = torch.cat(weights)
        out[head, at] = weight @ torch.cat(parts) / weight.sum()
    return out


def test_sol_is_one_pooled_term_a_query_block(call: Call) -> None:
    call = without_e4m3(call, tokens=450)
    mode = BY_NAME["sol"]
    out, choice = run(call, mode, uniform(mode, call.heads, SHARE))
    assert (choice.valid & ~choice.kept).any()
    rows = range(0, out.shape[1], 7)
    assert rel_l2(out[:, rows], sol_by_definition(call, choice.kept, rows)) < INT8_ALONE
    plain, _ = run(call, BY_NAME["ours manual"], uniform(mode, call.heads, SHARE))
    assert rel_l2(plain, out) > 2 * INT8_ALONE, "the pooled term changes the output"


@pytest.mark.parametrize("density", [0.35, 0.5, 1.0])
def test_a_share_reaches_its_density_and_no_more(call: Call, density: float) -> None:
    mode, packed = BY_NAME["ours manual"], call.cubes
    share = share_for(mode, packed, density, call.is_causal)

    def reached(share: float) -> float:
        budget = uniform(mode, call.heads, share)
        _, choice = attend(mode, packed, budget, is_causal=call.is_causal)
        return float(reached_density(choice).mean())

    assert reached(share) <= density
    one_block = 1 / packed.operands.key_counts.shape[1]
    if density < 1:
        assert reached(share + one_block) > density
    else:
        assert reached(share) == 1


@every_mode
def test_only_the_sampled_query_blocks_are_computed_and_none_differs(
    video: Call, mode: Mode
) -> None:
    budget = uniform(mode, video.heads, SHARE)
    whole, _ = run(video, mode, budget)
    sample = Sample.draw(video.packed(mode.cubes), 2, seed=3, avoid=())
    out, _ = emulated(mode, video, budget, sample)
    assert torch.equal(out, whole[:, sample.tokens])


@every_mode
def test_at_once_is_the_same_attention(video: Call, mode: Mode) -> None:
    """But for the rounding of P, whose steps are relative to another maximum."""
    packed, budget = video.packed(mode.cubes), uniform(mode, video.heads, SHARE)
    by_block, choice = attend(mode, packed, budget)
    at_once, same = attend(mode, packed, budget, at_once=True)
    assert torch.equal(choice.kept, same.kept)
    rows = packed.occupied
    assert rel_l2(at_once[:, :, rows], by_block[:, :, rows]) < 0.01
    exact = without_e4m3(video).packed(mode.cubes)
    by_block, _ = attend(mode, exact, budget)
    at_once, _ = attend(mode, exact, budget, at_once=True)
    assert rel_l2(at_once[:, :, rows], by_block[:, :, rows]) < 1e-4


def test_at_once_has_the_output_scale_too(video: Call) -> None:
    mode, packed = BY_NAME["ours auto"], without_e4m3(video).packed(cubes=True)
    without = uniform(mode, video.heads, SHARE)
    contrast = torch.logspace(-1, 2, video.heads).index_fill(0, torch.tensor(0), 1)
    budget = replace(without, contrast=contrast)
    by_block, choice = attend(mode, packed, budget)
    at_once, _ = attend(mode, packed, budget, at_once=True)
    dropping, _ = attend(mode, packed, without, at_once=True)
    rows = packed.occupied
    assert not choice.kept.equal(choice.valid)
    assert rel_l2(at_once[:, :, rows], by_block[:, :, rows]) < 1e-4
    assert rel_l2(at_once[:, 0, rows], dropping[:, 0, rows]) == 0, "it has none"
    for head in range(1, video.heads):
        assert rel_l2(at_once[:, head, rows], dropping[:, head, rows]) > 2 * INT8_ALONE


@every_mode
def test_a_language_model_attends_in_the_mode(text: Call, mode: Mode) -> None:
    budgets = [uniform(mode, text.heads, share) for share in (1.0, 0.1)]
    densities: list[Tensor] = []
    attention = attention_of(mode, budgets, densities)
    q, k, v = (x.float() for x in (text.layer.q, text.layer.k, text.layer.v))
    truth, _ = exact_attention(q, k, v, is_causal=True)
    assert rel_l2(attention(0, q, k, v), truth) < EIGHT_BITS
    assert rel_l2(attention(1, q, k, v), truth) > 2 * EIGHT_BITS
    assert densities[0].tolist() == [1.0] * text.heads
    assert all(0 < density < 1 for density in densities[1].tolist())

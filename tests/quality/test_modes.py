# SPDX-License-Identifier: Apache-2.0
"""Each mode of the quality benchmark against the maths that it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.metrics import rel_l2
from benchmarks.quality.judge import Call
from benchmarks.quality.modes import BY_NAME, MODES, Mode, attention, order_of
from benchmarks.quality_data.layer import Layer
from sparge.blocks import KEY_BLOCK, QUERY_BLOCK
from sparge.head_settings import HeadSettings
from sparge.order.grid import TokenGrid
from sparge.reference import route
from tests.session.parts import neighbours_alike

EIGHT_BITS = 0.02  # relative L2; without E4M3 0.004: measured for INT8 QK, and FP16 V
SHARE = 0.3
GRID = TokenGrid(5, 13, 17, prefix=5)  # 1,110 tokens: 9 query blocks, 18 key blocks


@pytest.fixture
def video(generator: torch.Generator) -> Call:
    """Two heads; the first looks at its neighbours, the second at nearly everything."""
    strength = torch.tensor([1.7, 0.7])[:, None, None]
    q, k, v = ((strength * x).bfloat16() for x in neighbours_alike(GRID, generator))
    return Call(Layer("made", q, k, v, GRID))


def run(call: Call, mode: Mode, share: float) -> tuple[Tensor, float]:
    """(heads, tokens, D) in token order, and the density."""
    layer, head_settings = call.layer, HeadSettings.uniform(call.heads, share)
    order = order_of(mode, layer.grid, layer.q.device)
    out, density = attention(mode, *layer[1:4], head_settings, order)
    return out[0], density()


@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
def test_all_blocks_kept_is_dense_attention(video: Call, mode: Mode) -> None:
    truth = video.truth(torch.arange(video.layer.q.shape[2]))
    dense, density = run(video, mode, 1.0)
    assert density == 1 and rel_l2(dense, truth) < EIGHT_BITS
    sparse, density = run(video, mode, 0.1)
    assert density < 0.6
    assert rel_l2(sparse, truth) > 2 * EIGHT_BITS, "dropping blocks changes the output"


def test_drop_is_a_top_k_of_pooled_scores_in_raster_order(video: Call) -> None:
    out, _ = run(video, BY_NAME["drop"], SHARE)
    q, k, v = (x.float() for x in (video.layer.q, video.layer.k, video.layer.v))

    def means(rows: Tensor, size: int) -> Tensor:
        return torch.stack([part.mean(2) for part in rows.split(size, 2)], 2)

    scores = means(q, QUERY_BLOCK) @ means(k, KEY_BLOCK).transpose(2, 3)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(-1, scores.topk(int(SHARE * scores.shape[-1])).indices, True)
    # A ragged last block counts by its keys here, and as a whole one upstream.
    whole = [*range(video.layer.q.shape[2] // QUERY_BLOCK * QUERY_BLOCK)]
    seen = kept.repeat_interleave(QUERY_BLOCK, 2).repeat_interleave(KEY_BLOCK, 3)
    seen = seen[..., : q.shape[2], : k.shape[2]]
    expected = scaled_dot_product_attention(q, k, v, attn_mask=seen)
    same = torch.isclose(out[:, whole], expected[0][:, whole], rtol=0.02, atol=0.02).all(-1)
    assert same.float().mean() > 0.8


def test_sol_is_one_pooled_term_a_query_block(video: Call) -> None:
    """Each dropped block as if every query were the mean of its block, of what the rows do not have
    in common: K less its mean."""
    mode, layer = BY_NAME["sol"], video.layer
    x = video.operands(cubes=True)
    assert x.order is not None
    policy, _ = mode.rules(HeadSettings.uniform(2, SHARE))
    scale = layer.q.shape[-1] ** -0.5
    slot = x.order.token_slots[0].long()
    query_block, key_block = slot // QUERY_BLOCK, slot // KEY_BLOCK
    kept = route(x, policy, scale=scale).kept[0][:, query_block][:, :, key_block]

    def block_means(rows: Tensor, block: Tensor) -> Tensor:
        """Each token's block's mean."""
        means = [rows[:, block == index].mean(1) for index in range(int(block.max()) + 1)]
        return torch.stack(means, 1)[:, block]

    q, k, v = (part[0].double() for part in layer[1:4])
    k = k - k.mean(1, keepdim=True)
    pooled = block_means(q, query_block) @ block_means(k, key_block).mT
    expected = (torch.where(kept, q @ k.mT, pooled) * scale).softmax(-1) @ v
    out, _ = run(video, mode, SHARE)
    assert rel_l2(out, expected) < EIGHT_BITS

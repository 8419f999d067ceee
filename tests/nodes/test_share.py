# SPDX-License-Identifier: Apache-2.0
"""Share of the attention that a run computed, as its user is told: of every self-attention call, by
its pairs of a query and a key."""

from __future__ import annotations

import pytest
import torch

from tests.nodes.parts import BLOCKS, HEADS, TOKENS, network

pytestmark = pytest.mark.usefixtures("reference_allowed")

SIGMAS = [1.0, 0.9, 0.7, 0.6, 0.5]  # the first two are before start_percent
DENSE, SPARSE = 2, 3
SOUND = 100


@pytest.fixture
def share(load_pack):
    """share(run): what the node says, and what the log says, in percent."""
    verdict = load_pack("sparge.session").verdict

    def told(got):
        on_node = verdict(got.last).split("\n")[1].split(" % of attention computed")[0]
        in_log = got.line.split(" % of attention computed")[0].split(", ")[-1]
        assert int(on_node) == round(float(in_log))
        return float(in_log)

    return told


@pytest.mark.parametrize("mode", ["manual", "auto budget"])
def test_dense_steps_count_as_all_of_theirs(sampled, step, share, mode):
    got = sampled(step, SIGMAS, mode=mode, topk=0.5)
    assert (got.counts.sparse, got.counts.dense) == (SPARSE * BLOCKS, DENSE * BLOCKS)
    found = got.last.densities
    assert 0.3 < found.of_sparse_calls < 0.7
    assert found.overall == pytest.approx((DENSE + SPARSE * found.of_sparse_calls) / len(SIGMAS))
    assert share(got) == pytest.approx(100 * found.overall, abs=0.05)
    assert f"density of sparse calls {100 * found.of_sparse_calls:.1f} %" in got.line
    assert f"Density by step, %: 100 100 {100 * found.of_sparse_calls:.0f}" in got.details


def test_sound_counts_but_is_no_layer_of_the_picture(sampled, generator, share):
    """It attends to itself in the layers of the clip."""
    clip, sound = (torch.randn(1, n, HEADS * 64, generator=generator) for n in (TOKENS, SOUND))

    def step(attend):
        for _ in range(BLOCKS):
            attend(clip, clip, clip, HEADS)
            attend(clip, sound, sound, HEADS)
            attend(sound, sound, sound, HEADS)

    grid = (4, 8, 8)
    got = sampled(
        step,
        [0.5],
        network("LTXAVModel", num_attention_heads=HEADS, transformer_blocks=range(BLOCKS)),
        grid,
        extras={"latent_shapes": [(1, 4, *grid), (1, 8, SOUND, 16)]},
        topk=0.5,
    )
    found = got.last.densities
    assert (got.counts.sparse, got.counts.dense, got.counts.cross) == (BLOCKS, BLOCKS, BLOCKS)
    assert found.layers.tolist() == list(range(BLOCKS))
    computed = found.of_sparse_calls * TOKENS**2 + SOUND**2
    assert share(got) == pytest.approx(100 * computed / (TOKENS**2 + SOUND**2), abs=0.05)

# SPDX-License-Identifier: Apache-2.0
"""The network's shapes, names and positions. tests/comfy compares its numbers with ComfyUI's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv3d

from benchmarks.tiny_video_dit.model import (
    CHANNELS,
    PatchEmbedding,
    dense,
    initialised,
    patches,
    rotary,
    rotated,
)


def test_output_is_shaped_like_the_latent(toy_model, generator) -> None:
    latent = torch.randn(2, CHANNELS, 3, 10, 6, generator=generator)
    text = torch.randn(2, 7, 64, generator=generator)
    out = toy_model(latent, torch.tensor([900.0, 20.0]), text)
    assert out.shape == latent.shape
    alone = toy_model(latent[1:], torch.tensor([20.0]), text[1:])
    torch.testing.assert_close(out[1:], alone, rtol=1e-4, atol=1e-4)


def test_attention_can_be_replaced(toy_model, generator) -> None:
    calls = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int) -> torch.Tensor:
        calls.append((block, q.shape, k.shape, v.shape))
        return dense(q, k, v, block)

    latent = torch.randn(2, CHANNELS, 3, 4, 6, generator=generator)
    given = (latent, torch.tensor([1.0, 2.0]), torch.randn(2, 7, 64, generator=generator))
    assert torch.equal(toy_model(*given, spy), toy_model(*given))
    shape = (2, 1, 3 * 2 * 3, 128)
    assert calls == [(0, shape, shape, shape), (1, shape, shape, shape)]


def test_patches_are_a_strided_convolution(generator) -> None:
    latent = torch.randn(2, CHANNELS, 3, 6, 10, generator=generator)
    layer = PatchEmbedding(8)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    expected = conv3d(latent, layer.weight, layer.bias, stride=(1, 2, 2)).flatten(2).mT
    torch.testing.assert_close(layer(patches(latent, (3, 3, 5))), expected, rtol=1e-4, atol=1e-4)


def test_rotary_products_depend_on_the_distance_only(generator) -> None:
    turns = rotary((4, 5, 6), torch.device("cpu")).view(4, 5, 6, -1)
    q, k = torch.randn(2, 1, 1, 1, 128, generator=generator)

    def product(at: tuple[int, int, int], other: tuple[int, int, int]) -> float:
        return float((rotated(q, turns[at]) * rotated(k, turns[other])).sum())

    assert product((3, 4, 5), (1, 3, 2)) == pytest.approx(product((2, 1, 3), (0, 0, 0)), abs=1e-4)
    assert product((3, 4, 5), (1, 3, 2)) != pytest.approx(product((3, 4, 5), (1, 2, 2)), abs=1e-2)


def test_initial_weights_depend_on_the_seed_only(toy) -> None:
    first, again, other = (initialised(toy, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.ffn.0.weight"], other["blocks.0.ffn.0.weight"])
    assert all(torch.isfinite(tensor).all() for tensor in first.values())

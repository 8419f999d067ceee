# SPDX-License-Identifier: Apache-2.0
"""The network's shapes, names and positions. tests/comfy compares its numbers with ComfyUI's."""

from __future__ import annotations

import torch

from benchmarks.tiny_video_dit.model import CHANNELS, dense, initialised


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


def test_initial_weights_depend_on_the_seed_only(toy) -> None:
    first, again, other = (initialised(toy, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.ffn.0.weight"], other["blocks.0.ffn.0.weight"])

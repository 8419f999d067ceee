# SPDX-License-Identifier: Apache-2.0
"""How much two clips differ, and both in one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def comparison(load_pack) -> Any:
    return load_pack("nodes.sparge_compare")


def clip(frames: int = 3, height: int = 24, width: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(frames)
    return torch.rand(frames, height, width, 3, generator=generator)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x, "The videos are equal"),
        (lambda x: x + 0.1, "Another picture: 20.0 dB PSNR"),
        (lambda x: x + 0.01 * (2 * (x > 0.5) - 1), "Small differences: 40.0 dB PSNR"),
        (lambda x: x + math.nan, "A video has pixels that are no numbers"),
        (lambda x: x + math.inf, "A video has pixels that are no numbers"),
    ],
    ids=["equal", "another", "near", "NaN", "inf"],
)
def test_likeness_is_psnr(comparison, change, said) -> None:
    assert comparison.likeness(clip(), change(clip())).startswith(said)


def test_views(comparison) -> None:
    reference, other = torch.zeros(2, 4, 6, 3), torch.full((2, 4, 6, 3), 0.1)
    other[0, 0, 0] = 0.9
    views = comparison.VIEWS
    both = views["side by side"](reference, other)
    assert torch.equal(both[:, :, :6], reference) and torch.equal(both[:, :, 6:], other)
    split = views["split"](reference, other)
    assert torch.equal(split[:, :, :2], reference[:, :, :2])
    assert torch.equal(split[:, :, 4:], other[:, :, 4:])
    assert (split[:, :, 2:4] == 1).all(), "the line"
    difference = views["difference x4"](reference, other)
    assert torch.allclose(difference[1], torch.tensor(0.4)) and (difference[0, 0, 0] == 1).all()
    assert (reference == 0).all() and other[0, 0, 0, 0] == 0.9, "what is given stays"


def test_transparency_and_16_bits_are_compared_as_colours_in_32(load_pack) -> None:
    """Qwen Image decodes layers with transparency; --fp16-intermediates makes images of 16 bits."""
    node = load_pack("nodes.sparge_compare").SpargeAttentionCompare
    reference = torch.linspace(0, 1, 32).view(1, 1, 32, 1).expand(2, 24, 32, 3).contiguous()
    other = reference + 1e-2 * clip(2)
    shown, expected = node.execute(reference, other)
    assert expected.startswith("Small differences: ")
    half = [each.half() for each in (reference, other)]
    with_alpha = torch.cat([other, torch.rand(2, 24, 32, 1)], 3)
    assert torch.equal(node.execute(reference, with_alpha)[0], shown)
    assert node.execute(reference, with_alpha)[1] == expected
    for given in ((with_alpha, with_alpha), (half[0], half[0])):
        assert node.execute(*given)[1] == "The videos are equal."
    for given in ((half[0], half[1]), (reference, half[1])):
        assert node.execute(*given)[1] == expected, "in 16 bits squares and variances get lost"


def test_clips_of_two_sizes(comparison) -> None:
    node, long = comparison.SpargeAttentionCompare, clip(3)
    shown, told = node.execute(long, long[:2])
    assert len(shown) == 2 and told.startswith("The videos are equal.\nThe videos have 3 and 2 ")
    shown, told = node.execute(long, clip(width=40))
    assert torch.equal(shown, clip(width=40)) and told.startswith("The videos are 32x24 and 40x24 ")

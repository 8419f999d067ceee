# SPDX-License-Identifier: Apache-2.0
"""The output scale against its definition, and in the kernels' arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import sparge
from sparge.head_settings import HeadSettings
from sparge.order.grid import TokenGrid, cube_order

GRID = TokenGrid(3, 8, 11, prefix=20, suffix=45)
CUBES = cube_order(GRID)
OUTPUT_SCALE = torch.tensor([1.5, 1.0, 0.5, 1.1])


def head_settings(output_scale: torch.Tensor | None) -> HeadSettings:
    return replace(HeadSettings.uniform(4, 0.3), output_scale=output_scale)


@pytest.fixture
def qkv(make_qkv) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = make_qkv(2, 4, GRID.tokens, 16, kv_heads=2)
    return q, k + 1, v + 2 * k


def test_one_changes_no_bit_and_others_every_row_that_drops(qkv) -> None:
    options: dict[str, Any] = {"order": CUBES, "output_dtype": torch.float32}
    plain = sparge.attention(*qkv, head_settings=head_settings(None), **options)
    ones = sparge.attention(*qkv, head_settings=head_settings(torch.ones(4)), **options)
    found = sparge.attention(*qkv, head_settings=head_settings(OUTPUT_SCALE), **options)
    assert torch.equal(plain, ones)
    assert torch.equal(plain[:, 1], found[:, 1])
    assert torch.equal(plain[:, :, :20], found[:, :, :20]), "text drops nothing"
    dense = CUBES.queries_exact[CUBES.token_slot.long() // 128].bool()
    assert (plain != found).any(-1)[:, [0, 2, 3]][:, :, ~dense].all()


def test_blocks_without_keys_are_not_dropped(make_qkv) -> None:
    q, k, v = make_qkv(2, 4, 640, 16)
    options: dict[str, Any] = {"key_lengths": torch.tensor([640, 192], dtype=torch.int32)}
    plain, found = (
        sparge.attention(q, k, v, head_settings=head_settings(x), **options)
        for x in (None, OUTPUT_SCALE)
    )
    assert torch.equal(plain[1], found[1]), "keeps all three blocks that hold keys"
    assert not torch.equal(plain[0], found[0])

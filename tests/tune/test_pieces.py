# SPDX-License-Identifier: Apache-2.0
"""Buckets of key blocks, cut into pieces."""

from __future__ import annotations

import torch

from sparge.blocks import pack, unpack
from sparge.tune.pieces import Pieces, every_bit, piece_counts

DENSITIES = (0.03, 0.23, 0.6, 1.0)


def test_every_bit_is_in_one_piece() -> None:
    for count in (1, 2, 3, 5):
        pieces = [every_bit(count, first) for first in range(count)]
        assert all(-(2**31) <= piece < 2**31 for piece in pieces)
        bits = [{bit for bit in range(32) if piece >> bit & 1} for piece in pieces]
        assert sorted(bit for of_piece in bits for bit in of_piece) == list(range(32))


def test_pieces_are_the_buckets(generator: torch.Generator) -> None:
    counts = piece_counts(DENSITIES)
    assert counts == [1, 3, 5, 4]
    rank = torch.stack([torch.randperm(70, generator=generator) for _ in range(5)])
    exists = torch.arange(70) < 68
    kept = torch.stack([exists & (rank < count) for count in (2, 16, 42, 70)])
    maps = pack(kept)[None, None]  # (B, H, densities, S, words)
    every = pack(exists[None])
    pieces = unpack(Pieces.of(DENSITIES, every, 5).cut(maps[:, :, :-1]), 70)
    buckets = kept.clone()
    buckets[1:] ^= kept[:-1]
    assert pieces.shape == (1, 1, 13, 5, 70)
    found = [part.sum(0) for part in pieces[0, 0].int().split(counts)]
    assert torch.equal(torch.stack(found), buckets.int()), "each block in one piece"

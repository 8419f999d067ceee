# SPDX-License-Identifier: Apache-2.0
"""Buckets of key blocks, cut into pieces."""

from __future__ import annotations

import torch

from sparge.calibrate.pieces import Pieces, every_bit, piece_counts
from sparge.plan import pack

DENSITIES = (0.03, 0.23, 0.6, 1.0)


def test_every_bit_is_in_one_piece() -> None:
    for count in (1, 2, 3, 5):
        pieces = [every_bit(count, first) for first in range(count)]
        assert all(-(2**31) <= piece < 2**31 for piece in pieces)
        bits = [{bit for bit in range(32) if piece >> bit & 1} for piece in pieces]
        assert sorted(bit for of_piece in bits for bit in of_piece) == list(range(32))


def test_pieces_are_the_buckets() -> None:
    assert piece_counts(DENSITIES) == [1, 1, 2, 2]
    rank = torch.stack([torch.randperm(70) for _ in range(5)])  # (S, nk)
    kept = torch.stack([rank < count for count in (2, 16, 42)])[None, None, None]
    every = pack((torch.arange(70) < 68)[None])
    kept &= torch.arange(70) < 68
    pieces = Pieces.of(DENSITIES, torch.device("cpu")).cut(pack(kept), every)
    assert pieces.shape == (1, 1, 1, 6, 5, 3)
    buckets = pack(torch.cat([kept, (torch.arange(70) < 68).expand_as(kept[:, :, :, :1])], 3))
    joined = [pieces[:, :, :, piece] for piece in range(6)]
    assert torch.equal(joined[0], buckets[:, :, :, 0])
    assert torch.equal(joined[0] | joined[1], buckets[:, :, :, 1])
    assert not (joined[2] & joined[3]).any() and not (joined[4] & joined[5]).any()
    assert torch.equal(buckets[:, :, :, 1] | joined[2] | joined[3], buckets[:, :, :, 2])
    assert torch.equal(buckets[:, :, :, 2] | joined[4] | joined[5], buckets[:, :, :, 3])
    assert not (buckets[:, :, :, 2] & (joined[4] | joined[5])).any()

# SPDX-License-Identifier: Apache-2.0
"""The block map: one bit for each (query block, key block), and how much of the work it keeps."""

from __future__ import annotations

import torch
from torch import Tensor

QUERY_BLOCK = 128  # queries that a row of the block map stands for, on every GPU
KEY_BLOCK = 64  # keys that one bit of it stands for
STEP_BLOCKS = 2  # key blocks that attend takes at once on Hopper
WORD_BITS = 32


def block_count(tokens: int, block: int) -> int:
    """Number of blocks of `block` tokens that cover `tokens`, the last one possibly partial."""
    return -(-tokens // block)


def whole_steps(ranked: Tensor, forced: Tensor) -> Tensor:
    """Ranked blocks that a list keeps where `ranked` are asked for.

    They are as many more as make whole steps of attend with the `forced` ones: half a step takes as
    long as a whole one.
    """
    return ranked + -(ranked + forced) % STEP_BLOCKS


def pack(kept: Tensor) -> Tensor:
    """Packs (..., nk) bool into (..., ceil(nk / 32)) int32: bit b of word w is key block 32 w +
    b.
    """
    words = block_count(kept.shape[-1], WORD_BITS)
    padded = torch.nn.functional.pad(kept, (0, words * WORD_BITS - kept.shape[-1]))
    bits = padded.unflatten(-1, (words, WORD_BITS)).to(torch.int32)
    return (bits << _bit_positions(kept)).sum(-1, dtype=torch.int32)


def unpack(block_map: Tensor, key_blocks: int) -> Tensor:
    """Inverse of `pack`: (..., words) int32 to (..., key_blocks) bool."""
    bits = (block_map.unsqueeze(-1) >> _bit_positions(block_map)) & 1
    return bits.flatten(-2)[..., :key_blocks].bool()


def touches_diagonal(blocks: Tensor) -> Tensor:
    """(nq, nk) bool for a map `blocks` (..., nq, nk): the block's last key is not before its first
    query. To be combined with validity."""
    query_blocks, key_blocks = blocks.shape[-2:]
    first_query = torch.arange(query_blocks, device=blocks.device) * QUERY_BLOCK
    last_key = (torch.arange(key_blocks, device=blocks.device) + 1) * KEY_BLOCK - 1
    return last_key >= first_query.unsqueeze(-1)


def block_pairs(n_queries: int, key_counts: Tensor, is_causal: bool) -> Tensor:
    """(B, nq, nk) int64: query-key pairs inside each block.

    `key_counts` (B, nk) holds the keys each key block really has. Causal counts a pair only when
    its key is not after its query (both counted from 0: top-left alignment).
    """
    device = key_counts.device
    first = torch.arange(block_count(n_queries, QUERY_BLOCK), device=device) * QUERY_BLOCK
    end = (first + QUERY_BLOCK).clamp(max=n_queries)
    keys = key_counts.long().unsqueeze(-2)
    if not is_causal:
        return (end - first).unsqueeze(-1) * keys

    def seen_by_rows_before(row: Tensor) -> Tensor:
        """Pairs of all rows before `row`: row r sees r + 1 - first key of them, at most `keys`."""
        rows = (row.unsqueeze(-1) - key_starts).clamp(min=0)
        ramp = torch.minimum(rows, keys)
        return ramp * (ramp + 1) // 2 + (rows - ramp) * keys

    key_starts = torch.arange(key_counts.shape[-1], device=device) * KEY_BLOCK
    return seen_by_rows_before(end) - seen_by_rows_before(first)


def count_keys(n_keys: int, key_lengths: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """(B, nk) int32: valid keys of each key block, where batch entry b has `key_lengths[b]`."""
    starts = torch.arange(block_count(n_keys, KEY_BLOCK), device=device) * KEY_BLOCK
    if key_lengths is None:
        lengths = torch.full((batch, 1), n_keys, device=device)
    else:
        lengths = key_lengths.to(device).long().clamp(0, n_keys).unsqueeze(-1)
    return (lengths - starts).clamp(0, KEY_BLOCK).to(torch.int32)


def _bit_positions(like: Tensor) -> Tensor:
    return torch.arange(WORD_BITS, dtype=torch.int32, device=like.device)

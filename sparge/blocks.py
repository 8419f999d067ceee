# SPDX-License-Identifier: Apache-2.0
"""The block map: one bit for each (query block, key block), and how much of the work it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .checks.argument import check_tensor, flag, whole_number

QUERY_BLOCK = 128  # queries that a row of the block map stands for, on every GPU
KEY_BLOCK = 64  # keys that one bit of it stands for
STEP_BLOCKS = 2  # key blocks that attend takes at once on Hopper
WORD_BITS = 32
ALL_BLOCKS = -1  # word of a map that keeps 32 blocks; bits of blocks that do not exist do no harm

Counts = TypeVar("Counts", Tensor, NDArray[np.int64])


def block_count(tokens: int, block: int) -> int:
    """Number of blocks of `block` tokens that cover `tokens`, the last one possibly partial."""
    return -(-tokens // block)


def whole_steps(ranked: Counts, forced: Counts) -> Counts:
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


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Key blocks that each query block of each head attends to; made once, usable many times.

    block_map: (B, H, ceil(Nq / 128), ceil(ceil(Nk / 64) / 32)) int32, laid out as by `pack`.
    counts: (B, H, ceil(Nq / 128)) int32, set bits of each row. key_lengths: (B,) int32, or None
    where every key is valid.
    """

    block_map: Tensor
    counts: Tensor
    n_queries: int
    n_keys: int
    is_causal: bool = False
    key_lengths: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("n_queries", "n_keys"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1))
        object.__setattr__(self, "is_causal", flag("is_causal", self.is_causal))
        self._check_tensors()
        for name in ("block_map", "counts"):  # kernels read them in place
            object.__setattr__(self, name, getattr(self, name).contiguous())

    def _check_tensors(self) -> None:
        """Checks types and sizes, which kernels take for granted. Stray bits do no harm, so values
        are not read: that would synchronise."""
        words = block_count(self.key_blocks, WORD_BITS)
        sizes = {"block_map": (self.query_blocks, words), "counts": (self.query_blocks,)}
        for name in sizes:
            check_tensor(name, getattr(self, name), "int32, as make_plan gives it")
        rows = tuple(self.counts.shape[:2])
        for name, of_row in sizes.items():
            value = getattr(self, name)
            if tuple(value.shape) != (*rows, *of_row) or value.dtype != torch.int32:
                needed = ", ".join(map(str, of_row))
                raise ValueError(
                    f"{name} is {value.dtype} of shape {tuple(value.shape)}; {self.n_queries} "
                    f"queries and {self.n_keys} keys need int32 of shape (B, H, {needed}): make it "
                    "with make_plan or BlockPlan.from_kept."
                )
        if self.counts.device != self.device:
            raise ValueError(
                f"block_map is on {self.device} and counts on {self.counts.device}: put both on "
                "one device."
            )

    @classmethod
    def from_kept(
        cls,
        kept: Tensor,
        n_queries: int,
        n_keys: int,
        is_causal: bool = False,
        key_lengths: Tensor | None = None,
    ) -> BlockPlan:
        """Makes a plan from a map (B, H, ceil(Nq / 128), ceil(Nk / 64)), nonzero keeps. Blocks
        without a query-key pair, behind the key length or the diagonal, are left out of it."""
        check_tensor("kept", kept, "bool of shape (B, H, query blocks, key blocks)")
        expected = (block_count(n_queries, QUERY_BLOCK), block_count(n_keys, KEY_BLOCK))
        if kept.dim() != 4 or tuple(kept.shape[2:]) != expected:
            raise ValueError(
                f"The block map has shape {tuple(kept.shape)}; {n_queries} queries and {n_keys} "
                f"keys need (B, H, {expected[0]}, {expected[1]}): a row for each {QUERY_BLOCK} "
                f"queries, a column for each {KEY_BLOCK} keys."
            )
        pairs = block_pairs(
            n_queries, count_keys(n_keys, key_lengths, kept.shape[0], kept.device), is_causal
        )
        kept = (kept != 0) & (pairs > 0).unsqueeze(1)
        counts = kept.sum(-1, dtype=torch.int32)
        return cls(pack(kept), counts, n_queries, n_keys, is_causal, key_lengths)

    @property
    def batch(self) -> int:
        return self.counts.shape[0]

    @property
    def heads(self) -> int:
        return self.counts.shape[1]

    @property
    def query_blocks(self) -> int:
        return block_count(self.n_queries, QUERY_BLOCK)

    @property
    def key_blocks(self) -> int:
        return block_count(self.n_keys, KEY_BLOCK)

    @property
    def device(self) -> torch.device:
        return self.block_map.device

    def kept(self) -> Tensor:
        """(B, H, query_blocks, key_blocks) bool: the map."""
        return unpack(self.block_map, self.key_blocks)

    def key_counts(self) -> Tensor:
        """(B, key_blocks) int32: the valid keys of each key block."""
        return count_keys(self.n_keys, self.key_lengths, self.batch, self.device)

    def visited_blocks(self) -> Tensor:
        """(B, H) int64: kept blocks that hold a query-key pair."""
        pairs = block_pairs(self.n_queries, self.key_counts(), self.is_causal)
        return (self.kept() & (pairs > 0).unsqueeze(1)).sum((-2, -1))

    def kept_pairs(self) -> Tensor:
        """(B, H) int64: query-key pairs inside the kept blocks."""
        pairs = block_pairs(self.n_queries, self.key_counts(), self.is_causal)
        return torch.where(self.kept(), pairs.unsqueeze(1), 0).sum((-2, -1))

    def valid_pairs(self) -> Tensor:
        """(B, H) int64: query-key pairs that dense attention would compute."""
        pairs = block_pairs(self.n_queries, self.key_counts(), self.is_causal)
        return pairs.sum((-2, -1)).unsqueeze(1).expand(self.batch, self.heads)

    def density(self) -> float:
        """Share of valid query-key pairs that are kept, over all heads (1 when there are none).
        Synchronises."""
        valid = int(self.valid_pairs().sum())
        return int(self.kept_pairs().sum()) / valid if valid else 1.0

    def heads_slice(self, heads: slice) -> BlockPlan:
        """Plan of some of the query heads."""
        return BlockPlan(
            self.block_map[:, heads],
            self.counts[:, heads],
            self.n_queries,
            self.n_keys,
            self.is_causal,
            self.key_lengths,
        )

    def check_fits(
        self,
        q: Tensor,
        k: Tensor,
        is_causal: bool,
        key_lengths: Tensor | None,
        block_mask: Tensor | None,
    ) -> None:
        """Raises ValueError unless this plan was made for q (B, H, Nq, D) and k (B, Hkv, Nk, D)."""
        made_for = (self.batch, self.heads, self.n_queries, self.n_keys)
        given = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if made_for != given or self.device != q.device:
            raise ValueError(
                f"The plan was made for (B, H, Nq, Nk) = {made_for} on {self.device}, the call has "
                f"{given} on {q.device}: make a plan for each shape."
            )
        if block_mask is not None:
            raise ValueError("Give plan or block_mask, not both: each replaces routing.")
        if (is_causal and not self.is_causal) or (
            key_lengths is not None and key_lengths is not self.key_lengths
        ):
            raise ValueError(
                "is_causal and key_lengths belong to the plan: pass them to make_plan, not here."
            )

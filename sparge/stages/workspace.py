# SPDX-License-Identifier: Apache-2.0
"""Layout of the one allocation of a call: where each intermediate of the pipeline lies in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks import KEY_BLOCK, QUERY_BLOCK, WORD_BITS, block_count
from ..kernels.params import PoolColumn
from ..kernels.spec import HEAD_DIMS, Element

_ALIGNMENT = 256
#: What launch 1 finds, (B, Hkv, head_dim) float32 each.
MEANS = ("k_mean", "v_mean", "v_scale", "k_extent")


class CallShape(NamedTuple):
    """Sizes of one attention call; ``channels`` is the caller's head dim, up to 128.

    ``queries`` and ``keys`` count slots: those of the token order where there is one, else tokens.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    channels: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, slots: int | None = None) -> CallShape:
        """Makes the sizes of q (B, H, Nq, D) and k (B, Hkv, Nk, D); ``slots`` of a token order."""
        queries, keys = (q.shape[2], k.shape[2]) if slots is None else (slots, slots)
        return cls(q.shape[0], q.shape[1], k.shape[1], queries, keys, q.shape[3])

    @property
    def head_dim(self) -> int:
        """Head dim of the kernels: ``channels`` padded up."""
        return next(size for size in HEAD_DIMS if self.channels <= size)

    @property
    def query_blocks(self) -> int:
        return block_count(self.queries, QUERY_BLOCK)

    @property
    def key_blocks(self) -> int:
        return block_count(self.keys, KEY_BLOCK)

    @property
    def map_words(self) -> int:
        return block_count(self.key_blocks, WORD_BITS)

    @property
    def map_shape(self) -> tuple[int, int, int, int]:
        """(B, H, query blocks, words) of a block map."""
        return self.batch, self.heads, self.query_blocks, self.map_words

    @property
    def list_words(self) -> int:
        """Words of the list of what a query block attends to, in csrc/attend/block_list.cuh."""
        return self.map_words + block_count(self.pool_tiles, WORD_BITS) + 1

    @property
    def pool_tiles(self) -> int:
        """Number of tiles of 64 pseudo-keys, one pseudo-key a key block."""
        return block_count(self.key_blocks, KEY_BLOCK)


@dataclass(frozen=True)
class Field:
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, workspace: Tensor) -> Tensor:
        flat = workspace[self.offset : self.offset + self.nbytes]
        return flat.view(self.dtype).view(self.shape)


class WorkspaceLayout:
    """Fields of the workspace by name; shapes as in ``csrc/params.cuh``.

    A call with a block mask needs no query statistics, one without head settings no variances and
    pseudo-keys, one that keeps every block no map: those fields are absent.
    """

    def __init__(
        self,
        shape: CallShape,
        element: Element,
        with_queries: bool,
        with_pools: bool = False,
        with_map: bool = False,
    ) -> None:
        kv = (shape.batch, shape.kv_heads)
        blocks = (*kv, shape.key_blocks)
        queries = (shape.batch, shape.heads, shape.query_blocks)
        key_bytes = 1 if element.quantized else 2
        value_bytes = element.value_bytes
        tile = KEY_BLOCK * shape.head_dim
        self.shape, self.element = shape, element
        self._end = 0
        self.fields: dict[str, Field] = {}
        self._add("next_item", (1,), torch.int32)
        for name in MEANS:
            self._add(name, (*kv, shape.head_dim))
        size = (len(MEANS), *kv, shape.head_dim)
        self._means = Field(self.fields[MEANS[0]].offset, size, torch.float32)
        if element.quantized:
            self._add("balance", (*kv, shape.head_dim))
            self._add("reach", kv)
        else:
            self._add("finite", (*kv, 2, shape.key_blocks), torch.uint8)
        self._add("k_scale", blocks)
        self._add("k_similarity", blocks)
        self._add("key_counts", blocks, torch.int32)
        self._add("k_block_mean", (*blocks, shape.head_dim))
        self._add("k_tiles", (*blocks, tile * key_bytes), torch.uint8)
        self._add("v_tiles", (*blocks, tile * value_bytes), torch.uint8)
        if element is Element.INT8_INT8:
            self._add("v_block_scale", blocks)
        if with_pools:
            tiles = (*kv, shape.pool_tiles)
            self._add("k_variance", (*blocks, shape.head_dim), torch.bfloat16)
            self._add("v_block_mean", (*blocks, shape.head_dim), torch.bfloat16)
            self._add("v_variance", blocks)
            self._add("v_square", blocks)
            self._add("pool_k", (*tiles, tile * key_bytes), torch.uint8)
            self._add("pool_v", (*tiles, tile * value_bytes), torch.uint8)
            self._add("pool_columns", (*tiles, KEY_BLOCK, len(PoolColumn._fields_)))
            if element is Element.INT8_INT8:
                self._add("pool_value_scale", (*tiles, KEY_BLOCK))
        if with_queries:
            self._add("q_similarity", queries)
            self._add("q_block_mean", (*queries, shape.head_dim))
        if with_map:
            self._add("block_map", shape.map_shape, torch.int32)

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        field = self.fields[name] = Field(self._end, shape, dtype)
        self._end += block_count(field.nbytes, _ALIGNMENT) * _ALIGNMENT

    @property
    def nbytes(self) -> int:
        return self._end

    def addresses(self, start: int) -> dict[str, int]:
        """Addresses of the fields of a workspace that starts there, by name."""
        return {name: start + field.offset for name, field in self.fields.items()}

    def view(self, workspace: Tensor, name: str) -> Tensor:
        """Field of a workspace, as a tensor in place."""
        return self.fields[name].of(workspace)

    def means(self, workspace: Tensor) -> Tensor:
        """(4, B, Hkv, head_dim): the fields `MEANS`, which lie side by side."""
        return self._means.of(workspace)


def _field_names() -> frozenset[str]:
    shape = CallShape(1, 1, 1, 1, 1, 1)
    layouts = (WorkspaceLayout(shape, each, True, True, True) for each in Element)
    return frozenset(name for layout in layouts for name in layout.fields)


#: Names of the fields that some workspace has.
FIELD_NAMES = _field_names()

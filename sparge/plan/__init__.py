# SPDX-License-Identifier: Apache-2.0
"""Which key blocks each query block attends to."""

from .blocks import KEY_BLOCK, QUERY_BLOCK, BlockPlan, block_count, block_pairs, pack, unpack

__all__ = [
    "KEY_BLOCK",
    "QUERY_BLOCK",
    "BlockPlan",
    "block_count",
    "block_pairs",
    "pack",
    "unpack",
]

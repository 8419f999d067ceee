# SPDX-License-Identifier: Apache-2.0
"""Block masks as upstream's callers build them: 128 x 64 tokens a block, or 64 x 128 on Hopper."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from ..blocks import KEY_BLOCK, QUERY_BLOCK, block_count
from ..checks.validate import as_heads_first
from ..errors import Unsupported

HOPPER_QUERY_BLOCK = 64
HOPPER_KEY_BLOCK = 128


def read_block_mask(mask_id: Tensor | None, q: Tensor, k: Tensor, layout: str) -> Tensor:
    """A new bool mask (B, H, ceil(Nq / 128), ceil(Nk / 64)) that keeps all that `mask_id` keeps.

    `mask_id` of that shape is read as it is. One of shape (B, H, ceil(Nq / 64), ceil(Nk / 128)) has
    Hopper's blocks: a row keeps what either of the two rows it covers keeps, and a column becomes
    two. That is exact where those two rows agree, and keeps more where they do not; what is kept
    counts in the density. The shape tells which of the two is meant: both are one and the same
    only for a single block of at most 64 queries and 64 keys, which means the same in either.
    """
    q, k = as_heads_first("q", q, layout), as_heads_first("k", k, layout)
    batch, heads, queries, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    rows, columns = block_count(queries, QUERY_BLOCK), block_count(keys, KEY_BLOCK)
    ours = (batch, heads, rows, columns)
    hopper = (
        *ours[:2],
        block_count(queries, HOPPER_QUERY_BLOCK),
        block_count(keys, HOPPER_KEY_BLOCK),
    )
    takes = (
        f"{ours}: batch, query heads, blocks of {QUERY_BLOCK} queries, blocks of {KEY_BLOCK} keys, "
        f"or {hopper} with blocks of {HOPPER_QUERY_BLOCK} queries and {HOPPER_KEY_BLOCK} keys, on "
        "every GPU"
    )
    if not isinstance(mask_id, Tensor):
        given = "None" if mask_id is None else f"a {type(mask_id).__name__}"
        raise Unsupported(
            f"mask_id is {given}; it is a tensor that says which blocks to keep, of shape {takes}."
        )
    if tuple(mask_id.shape) == ours:
        return mask_id != 0
    if tuple(mask_id.shape) != hopper:
        raise Unsupported(f"mask_id has shape {tuple(mask_id.shape)}; this call takes {takes}.")
    halves = pad(mask_id != 0, (0, 0, 0, 2 * rows - hopper[2])).unflatten(2, (rows, 2))
    return halves.any(3).repeat_interleave(2, -1)[..., :columns]

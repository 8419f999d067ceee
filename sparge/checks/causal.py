# SPDX-License-Identifier: Apache-2.0
"""Meaning of causal where there are more keys than queries, or fewer.

Two meanings are in use, and they differ by the whole past of a sequence: with a cache of 600 keys
one query sees key 0 alone, or all of them. So the caller says which.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from ..blocks import KEY_BLOCK, QUERY_BLOCK
from ..errors import Unsupported
from .argument import shown

#: Alignments. "top-left": query i sees keys 0..i. "bottom-right": the last query sees the last key.
Alignment = Literal["top-left", "bottom-right"]


def ends_with_the_keys(
    is_causal: bool, causal: Alignment | None, n_queries: int, n_keys: int
) -> bool:
    """Whether the call is causal in the meaning "bottom-right".

    Raises:
        ValueError: `causal` is neither meaning.
        Unsupported: the call may mean either.
    """
    if causal is not None and causal not in get_args(Alignment):
        raise ValueError(
            f"causal is {shown(causal)}; it takes 'top-left' (query i sees keys 0..i), "
            "'bottom-right' (the last query sees the last key) or None."
        )
    if is_causal and causal is None and n_queries != n_keys:
        raise Unsupported(
            f"is_causal=True with {n_queries} queries and {n_keys} keys may mean two things: say "
            "causal='bottom-right' (the last query sees the last key, as with a cache of keys) or "
            "causal='top-left' (query i sees keys 0..i, as torch has it)."
        )
    return causal == "bottom-right"


def check_bottom_right(
    n_queries: int, n_keys: int, key_lengths: Tensor | None, block_mask: Tensor | None
) -> None:
    """Raises Unsupported for arguments that have no one meaning there, or no parts that blocks can
    be cut into."""
    if key_lengths is not None:
        raise Unsupported(
            "key_lengths and causal='bottom-right' do not go together: the last query may belong "
            "to the last key or to the last valid one. Cut the keys off, one batch entry a call."
        )
    if n_queries == n_keys:
        return
    skipped, block = (
        (n_queries - n_keys, QUERY_BLOCK) if n_queries > n_keys else (n_keys - n_queries, KEY_BLOCK)
    )
    if block_mask is not None and skipped % block:
        raise Unsupported(
            f"block_mask and causal='bottom-right' take {n_queries} queries and {n_keys} keys "
            f"that differ by whole blocks of {block}: one block of the mask would lie on both "
            "sides of the border between old and new tokens."
        )

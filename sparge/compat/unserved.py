# SPDX-License-Identifier: Apache-2.0
"""Parts of upstream's package that this library cannot have: its kernels and what feeds them."""

from __future__ import annotations

from typing import NoReturn


def refuse(name: str) -> NoReturn:
    """Raises ModuleNotFoundError, an ImportError: callers of upstream's kernels guard against it.

    The error carries no name: for one with its own name, `from package import name` would put
    Python's sentence in place of this one.
    """
    raise ModuleNotFoundError(
        f"{name} is a part of upstream's own kernels, which the sparge library replaces: call "
        "block_sparse_sage2_attn_cuda with a block map, or install upstream's package instead of "
        "this one."
    )

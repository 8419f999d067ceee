# SPDX-License-Identifier: Apache-2.0
"""Upstream's tuned attention."""

from sparge.compat.autotune import (
    SparseAttentionMeansim,
    extract_sparse_attention_state_dict,
    load_sparse_attention_state_dict,
)

__all__ = [
    "SparseAttentionMeansim",
    "extract_sparse_attention_state_dict",
    "load_sparse_attention_state_dict",
]

# SPDX-License-Identifier: Apache-2.0
"""Upstream's attention functions."""

from sparge.compat.core import (
    block_sparse_sage2_attn_cuda,
    get_cuda_arch_versions,
    spas_sage2_attn_meansim_cuda,
    spas_sage2_attn_meansim_topk_cuda,
    spas_sage_attn_meansim_cuda,
    spas_sage_attn_meansim_topk_cuda,
)

__all__ = [
    "block_sparse_sage2_attn_cuda",
    "get_cuda_arch_versions",
    "spas_sage2_attn_meansim_cuda",
    "spas_sage2_attn_meansim_topk_cuda",
    "spas_sage_attn_meansim_cuda",
    "spas_sage_attn_meansim_topk_cuda",
]

# SPDX-License-Identifier: Apache-2.0
"""Upstream's module name for the functions of sparge.compat."""

try:
    from sparge.compat import (
        block_sparse_sage2_attn_cuda,
        spas_sage2_attn_meansim_cuda,
        spas_sage2_attn_meansim_topk_cuda,
        spas_sage_attn_meansim_cuda,
        spas_sage_attn_meansim_topk_cuda,
    )
except ModuleNotFoundError as error:
    if error.name not in ("sparge", "sparge.compat"):
        raise
    raise ImportError(
        "This spas_sage_attn is a shim over the sparge library, which is not installed: run "
        "`pip install .` in the root of the SpargeAttention node pack."
    ) from error

__all__ = [
    "block_sparse_sage2_attn_cuda",
    "spas_sage2_attn_meansim_cuda",
    "spas_sage2_attn_meansim_topk_cuda",
    "spas_sage_attn_meansim_cuda",
    "spas_sage_attn_meansim_topk_cuda",
]

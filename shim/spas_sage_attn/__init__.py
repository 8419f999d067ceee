# SPDX-License-Identifier: Apache-2.0
"""Upstream's module name for the functions of sparge.compat."""

try:
    from . import core, utils
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "sparge":
        raise
    raise ImportError(
        "This spas_sage_attn is a shim over the sparge library, which is not installed: run "
        "`pip install .` in the root of the SpargeAttention node pack."
    ) from error

from .core import (
    block_sparse_sage2_attn_cuda,
    spas_sage2_attn_meansim_cuda,
    spas_sage2_attn_meansim_topk_cuda,
    spas_sage_attn_meansim_cuda,
    spas_sage_attn_meansim_topk_cuda,
)

__all__ = [
    "block_sparse_sage2_attn_cuda",
    "core",
    "spas_sage2_attn_meansim_cuda",
    "spas_sage2_attn_meansim_topk_cuda",
    "spas_sage_attn_meansim_cuda",
    "spas_sage_attn_meansim_topk_cuda",
    "utils",
]

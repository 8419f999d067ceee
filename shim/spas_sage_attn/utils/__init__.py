# SPDX-License-Identifier: Apache-2.0
"""Upstream's helpers. The modules in this folder refuse the names of those that are not served."""

from sparge.compat.utils import (
    get_block_map_meansim,
    get_block_map_meansim_fuse_quant,
    get_cuda_arch_versions,
    hyperparameter_check,
    precision_metric,
)

__all__ = [
    "get_block_map_meansim",
    "get_block_map_meansim_fuse_quant",
    "get_cuda_arch_versions",
    "hyperparameter_check",
    "precision_metric",
]

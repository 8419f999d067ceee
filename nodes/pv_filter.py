# SPDX-License-Identifier: Apache-2.0
"""PV filter (`pvthreshd`) where it makes calls faster; elsewhere it would only cost exactness."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..sparge import SparsePolicy, capabilities
from ..sparge.kernels import pv_filter_saves
from ..sparge.policy import PV_FILTER_OFF

#: Remark of the end-of-run line, where the user asked for the filter.
LEFT_OUT = "pvthreshd left out: this GPU is faster and truer without it"


def fitted(policy: SparsePolicy, device: torch.device) -> SparsePolicy:
    """Policy as this device shall run it; unchanged where there are no kernels."""
    arch = capabilities(device).arch
    if not policy.pv_filter or not arch or pv_filter_saves(arch):
        return policy
    return replace(policy, pvthreshd=PV_FILTER_OFF)

# SPDX-License-Identifier: Apache-2.0
"""Training-free block-sparse attention on INT8 and FP8 tensor cores.

out = sparge.attention(q, k, v, sparge.SparsePolicy(topk=0.3))
"""

from .attention import Partials, attention, attention_partials, make_plan
from .errors import KernelBuildError, Unsupported
from .kernels import Capability, capabilities
from .padding import KeyPadding, key_padding
from .plan.blocks import BlockPlan
from .plan.budget import HeadBudget, Router
from .plan.grid import TokenGrid, TokenOrder, cube_order, grid_order
from .plan.walks import TURNS, Walk
from .policy import Precision, SparsePolicy
from .stats import AttentionStats

__all__ = [
    "TURNS",
    "AttentionStats",
    "BlockPlan",
    "Capability",
    "HeadBudget",
    "KernelBuildError",
    "KeyPadding",
    "Partials",
    "Precision",
    "Router",
    "SparsePolicy",
    "TokenGrid",
    "TokenOrder",
    "Unsupported",
    "Walk",
    "attention",
    "attention_partials",
    "capabilities",
    "cube_order",
    "grid_order",
    "key_padding",
    "make_plan",
]

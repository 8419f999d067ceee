# SPDX-License-Identifier: Apache-2.0
"""Training-free block-sparse attention on INT8 and FP8 tensor cores.

out = sparge.attention(q, k, v, sparge.SparsePolicy(topk=0.3))
"""

from .attention import attention
from .errors import KernelBuildError, Unsupported
from .head_settings import HeadSettings, Router
from .kernels import Capability, capabilities
from .order.grid import TokenGrid, TokenOrder, grid_order
from .order.variants import VARIANTS, OrderKind
from .padding import KeyPadding, key_padding
from .policy import Precision, SparsePolicy
from .sdpa import sdpa, sdpa_call
from .stats import AttentionStats, CallStats
from .torch_attention import TorchCall
from .version import __version__

__all__ = [
    "VARIANTS",
    "AttentionStats",
    "CallStats",
    "Capability",
    "HeadSettings",
    "KernelBuildError",
    "KeyPadding",
    "OrderKind",
    "Precision",
    "Router",
    "SparsePolicy",
    "TokenGrid",
    "TokenOrder",
    "TorchCall",
    "Unsupported",
    "__version__",
    "attention",
    "capabilities",
    "grid_order",
    "key_padding",
    "sdpa",
    "sdpa_call",
]

# SPDX-License-Identifier: Apache-2.0
"""Sparge Attention in engines that split one sequence over several GPUs.

context_parallel: diffusers' ContextParallelConfig. xdit_function: xDiT. sageattention_module:
yunchang and raylight. RankAttention: the function that all of these call.
"""

from ...order.places import dealt_places
from ...tune.ranks import all_heads, balanced_heads, heads_of_rank, work_of_ranks
from .attend import RankAttention
from .context_parallel import context_parallel
from .slots import sageattention_module, sageattention_slot, xdit_function
from .stats import RankStats

__all__ = [
    "RankAttention",
    "RankStats",
    "all_heads",
    "balanced_heads",
    "context_parallel",
    "dealt_places",
    "heads_of_rank",
    "sageattention_module",
    "sageattention_slot",
    "work_of_ranks",
    "xdit_function",
]

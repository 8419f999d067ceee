# SPDX-License-Identifier: Apache-2.0
"""What a caller asks of sparse attention, as one frozen value."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .thresholds import threshold_table

#: One number for all heads, or a float tensor with one value per query head.
PerHead = float | Tensor

#: At and above this many log2 units nothing is small enough to skip, so the filter is compiled out.
PV_FILTER_OFF = 50.0


class Precision(enum.Enum):
    """Arithmetic of the two matrix products."""

    INT8 = "int8"
    """INT8 QK; PV in E4M3 where the tensor cores multiply it in hardware, else in FP16."""
    INT8_FP16 = "int8_fp16"
    """INT8 QK and FP16 PV on every GPU: truer than E4M3, and slower where that exists."""
    SIXTEEN_BIT = "16bit"
    """No quantization: bf16 (fp16 for fp16 inputs) products, float32 accumulation."""


@dataclass(frozen=True)
class SparsePolicy:
    """Which key blocks each query block attends to, and with what arithmetic.

    A query block is 128 queries, a key block 64 keys. ``topk``, ``cdfthreshd``, ``simthreshd1`` and
    ``pvthreshd`` take one number, or a float tensor of shape ``(heads,)``.
    """

    select_by: str = "topk"
    """``"topk"`` ranks key blocks and keeps a share; ``"cdf"`` keeps a share of the pooled mass."""
    topk: PerHead = 0.5
    """Share of all key blocks that a query block keeps, at least one block. Lower is faster. With a
    token order it keeps one more where that and the blocks that are always kept are an odd number:
    on Hopper two take as long as one."""
    cdfthreshd: PerHead = 0.98
    """Cumulative pooled softmax mass that is kept, at least one block. Lower is faster."""
    simthreshd1: PerHead = -0.1
    """Blocks whose self-similarity (0..1) is at or below this are never dropped; below 0 is off."""
    pvthreshd: PerHead = PV_FILTER_OFF
    """Log2 units below the running maximum at which a block's PV is skipped. Lower is faster."""
    attention_sink: bool = False
    """Always keep key block 0."""
    keep_diagonal: bool = True
    """Under a causal mask, always keep the blocks on the diagonal: every row then sees a key."""
    exact_prefix: int = 0
    """Tokens at the start of the sequence (text) that attend and are attended to densely."""
    exact_suffix: int = 0
    """The same at the end of the sequence."""
    smooth_k: bool = True
    """Subtract the mean key before quantizing; exact, since softmax ignores a shared shift."""
    precision: Precision = Precision.INT8

    def __post_init__(self) -> None:
        if self.select_by not in ("topk", "cdf"):
            raise ValueError(
                f"select_by is {self.select_by!r}; it takes 'topk' (a share of the key blocks) "
                "or 'cdf' (a share of the pooled attention mass)."
            )
        _check_range("topk", self.topk, 0.0, 1.0)
        _check_range("cdfthreshd", self.cdfthreshd, 0.0, 1.0)
        _check_range("simthreshd1", self.simthreshd1, -math.inf, math.inf)
        _check_range("pvthreshd", self.pvthreshd, 0.0, math.inf)
        for name in ("exact_prefix", "exact_suffix"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it counts tokens from 0 up.")

    @property
    def pv_filter(self) -> bool:
        """Whether the PV filter can skip anything (a tensor is not read: it would synchronise)."""
        return isinstance(self.pvthreshd, Tensor) or self.pvthreshd < PV_FILTER_OFF

    @property
    def selection(self) -> PerHead:
        return self.topk if self.select_by == "topk" else self.cdfthreshd

    def head_thresholds(self, heads: int, device: torch.device) -> Tensor | None:
        """`threshold_table` of this policy, without pooling; None when all are scalars.

        Raises:
            ValueError: a per-head tensor does not have one value per query head.
        """
        columns = {
            self.select_by: self.selection,
            "simthreshd1": self.simthreshd1,
            "pvthreshd": self.pvthreshd,
        }
        tensors = {name: value for name, value in columns.items() if isinstance(value, Tensor)}
        for name, value in tensors.items():
            if value.shape not in ((), (heads,)):
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}; give one number or one value for each "
                    f"of the {heads} query heads."
                )
        if not tensors:
            return None
        columns["selection"] = columns.pop(self.select_by)
        return threshold_table(heads, device, **columns)


def _check_range(name: str, value: PerHead, low: float, high: float) -> None:
    """Scalars only: reading a tensor's values would synchronise with the GPU."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise ValueError(f"{name} is a {value.dtype} tensor; give floating point values.")
    elif not low <= value <= high:
        raise ValueError(f"{name} is {value}; it takes a number from {low:g} to {high:g}.")

# SPDX-License-Identifier: Apache-2.0
"""Policy of a caller for sparse attention, as one frozen value."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .checks.argument import check_kind, flag, number, shown, whole_number
from .compiling import as_constant
from .thresholds import check_per_head, threshold_table

#: One number for all heads, or a float tensor with one value per query head.
PerHead = float | Tensor

INT32_MAX = 2**31 - 1  # kernels count in 32 bits

#: Log2 units at and above which nothing is small enough to skip, so the filter is compiled out.
PV_FILTER_OFF = 50.0


#: Ranges of thresholds that are numbers.
_RANGES = {
    "topk": (0.0, 1.0),
    "cdfthreshd": (0.0, 1.0),
    "simthreshd1": (-math.inf, math.inf),
    "pvthreshd": (0.0, math.inf),
}
_GATES = ("simthreshd1", "pvthreshd")


class Precision(enum.Enum):
    """Arithmetic of the two matrix products."""

    INT8 = "int8"
    """INT8 QK; PV in what the GPU runs fastest: E4M3, INT8 or FP16. 16 bits on B300."""
    INT8_FP16 = "int8_fp16"
    """INT8 QK and FP16 PV on every GPU: closer to the original than 8 bits, and slower."""
    SIXTEEN_BIT = "16bit"
    """No quantization: bf16 products (fp16 where q, k and v all are), float32 accumulation."""


#: Named here, for torch.compile does not trace loops over an enum.
_PRECISIONS = "one of " + ", ".join(map(str, Precision))


def operand_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Dtype of 16-bit products of tensors of these dtypes: fp16 has not the range of the others."""
    return torch.float16 if all(dtype == torch.float16 for dtype in dtypes) else torch.bfloat16


class PolicyFacts(NamedTuple):
    """Plain values of a policy by the names of its fields, None for a threshold that is a tensor.
    Its sink and its exact tokens are not among them: parts of a call differ in those."""

    select_by: str
    topk: float | None
    cdfthreshd: float | None
    simthreshd1: float | None
    pvthreshd: float | None
    keep_diagonal: bool
    smooth_k: bool
    precision: str


@dataclass(frozen=True)
class SparsePolicy:
    """Rules for which key blocks each query block attends to, and with what arithmetic.

    A query block is 128 queries, a key block 64 keys. ``topk``, ``cdfthreshd``, ``simthreshd1`` and
    ``pvthreshd`` take one number, or a float tensor of shape ``(heads,)``.
    """

    select_by: str = "topk"
    """``"topk"`` ranks key blocks and keeps a share; ``"cdf"`` keeps a share of the pooled mass."""
    topk: PerHead = 0.5
    """Share of all key blocks that a query block keeps, at least one block. Lower is faster. With a
    token order it keeps one more where that and the blocks that are always kept are an odd number:
    on Hopper two take as long as one. Under a causal mask it is a share of all key blocks too, as
    upstream has it: queries that see no more than that keep all they see, so a share t keeps
    2 t - t^2 of the query-key pairs of a square call."""
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
    """Tokens at the end of the sequence that attend and are attended to densely."""
    smooth_k: bool = True
    """Subtract the mean key before quantizing; exact, since softmax ignores a shared shift."""
    precision: Precision = Precision.INT8
    facts: str = field(default="", init=False, repr=False, compare=False)
    """`PolicyFacts` as text: as arguments of an op of torch.compile numbers become symbols."""
    has_tensors: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether any threshold is a tensor."""

    def __post_init__(self) -> None:
        if self.select_by not in ("topk", "cdf"):
            raise ValueError(
                f"select_by is {shown(self.select_by)}; it takes 'topk' (a share of the key "
                "blocks) or 'cdf' (a share of the pooled attention mass)."
            )
        for name, (low, high) in _RANGES.items():
            self._set(name, _checked_threshold(name, getattr(self, name), low, high))
        for name in ("attention_sink", "keep_diagonal", "smooth_k"):
            self._set(name, flag(name, getattr(self, name)))
        for name in ("exact_prefix", "exact_suffix"):
            self._set(name, whole_number(name, getattr(self, name), 0, INT32_MAX))
        check_kind("precision", self.precision, Precision, _PRECISIONS)
        values = [getattr(self, name) for name in PolicyFacts._fields[:-1]]
        plain = [None if isinstance(value, Tensor) else value for value in values]
        self._set("facts", repr((*plain, self.precision.value)))
        self._set("has_tensors", bool(self.per_head))

    def _set(self, name: str, value: object) -> None:
        """Sets a field; NumPy's numbers become Python's."""
        if value is not getattr(self, name):
            object.__setattr__(self, name, value)

    @property
    def pv_filter(self) -> bool:
        """Whether the PV filter can skip anything (a tensor is not read: it would synchronise)."""
        return isinstance(self.pvthreshd, Tensor) or self.pvthreshd < PV_FILTER_OFF

    @property
    def selection(self) -> PerHead:
        return self.topk if self.select_by == "topk" else self.cdfthreshd

    @property
    def per_head(self) -> dict[str, Tensor]:
        """Thresholds that are tensors, by name."""
        values = {name: getattr(self, name) for name in _RANGES}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def head_thresholds(self, heads: int, device: torch.device) -> Tensor | None:
        """Returns `threshold_table` of this policy, without pooling; None when all thresholds are
        numbers.

        Raises:
            ValueError: a per-head tensor does not have one value per query head.
        """
        own = "topk" if self.select_by == "topk" else "cdfthreshd"
        tensors = self.per_head
        if not any(name in tensors for name in (own, *_GATES)):
            return None
        check_per_head(own, self.selection, heads)
        others = {name: getattr(self, name) for name in _GATES}
        return threshold_table(heads, device, selection=self.selection, **others)


def _checked_threshold(name: str, value: PerHead, low: float, high: float) -> PerHead:
    """Checks the range of a number. Reading a tensor's values would synchronise with the GPU."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise ValueError(f"{name} is a {value.dtype} tensor; give floating point values.")
        return value
    give = "a number, or a float tensor with one value for each query head"
    # With dynamic=True torch.compile takes the bounds for symbols, too.
    scalar, low, high = map(as_constant, (number(name, value, give), low, high))
    if not low <= scalar <= high:
        raise ValueError(f"{name} is {shown(scalar)}; it takes a number from {low:g} to {high:g}.")
    return scalar


def with_topk(default: SparsePolicy, topk: PerHead, others: Mapping[str, object]) -> SparsePolicy:
    """Policy of a caller who gives a topk alone; ValueError beside `others` that choose blocks."""
    if given := [name for name, value in others.items() if value is not None]:
        raise ValueError(
            f"topk and {given[0]} are given, and each says what is kept: leave one of them out."
        )
    keeps = type(topk) is float and not torch.compiler.is_compiling()
    return (_kept if keeps else replace)(default, topk=topk)


_kept = lru_cache(maxsize=64)(replace)


#: Dense attention in 8 bits: every block is kept, and nothing is filtered.
EIGHT_BIT_DENSE = SparsePolicy(topk=1.0)

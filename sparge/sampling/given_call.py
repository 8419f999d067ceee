# SPDX-License-Identifier: Apache-2.0
"""Attention call in the conventions of a host: what a pass asks of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

from torch import Tensor

from ..tune.call import Call
from .decision import CallFacts


class GivenCall(ABC):
    """One attention call."""

    q: Tensor
    mask: Tensor | None

    @cached_property
    @abstractmethod
    def tensors(self) -> Call | str:
        """Views of q, k and v that go together; or the reason why there are none, for the user."""

    @cached_property
    @abstractmethod
    def facts(self) -> CallFacts: ...

    @property
    @abstractmethod
    def key_mask(self) -> Tensor | None:
        """Mask of the call where it is one row of keys for all heads and queries of a batch entry,
        else None."""

    @abstractmethod
    def of_tensors(self, call: Call) -> GivenCall:
        """Same call without its mask, of other tensors (B, H, S, D) in and out."""

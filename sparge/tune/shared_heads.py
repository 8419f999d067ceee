# SPDX-License-Identifier: Apache-2.0
"""Heads of a model that several processes share, and what they tell each other of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import all_heads, heads_of_rank

if TYPE_CHECKING:
    from .measurement import Measurement
    from .settings_table import SettingsTable


@dataclass(frozen=True, eq=False)
class SharedHeads:
    """Heads of one model that `ranks` processes share: each has equally many of every layer, over
    all tokens, as the all-to-all of an engine gives them (Ulysses).

    Where `ranks` is more than 1 its methods wait for the other processes, so all of them call the
    same ones in the same order: a session calls them where a pass begins, and nowhere else.
    """

    rank: int
    ranks: int
    gather: Callable[[Tensor, int], Tensor]
    """Puts the tensors of all processes together along a dimension, in the order of the ranks."""

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None = None) -> SharedHeads:
        """Heads that the processes of a group share."""
        return cls(dist.get_rank(group), dist.get_world_size(group), all_heads(group))

    @property
    def alone(self) -> bool:
        """Whether one process has all heads."""
        return self.ranks == 1

    def own(self, heads: int) -> slice:
        """Heads of this process, of so many in all."""
        return heads_of_rank(heads, self.rank, self.ranks)

    def own_settings(self, settings: SettingsTable) -> SettingsTable:
        """Settings of the heads of this process."""
        return settings if self.alone else settings.of_heads(self.own(settings.heads))

    def measured(self, measurement: Measurement) -> Measurement:
        """Measurement of all heads, from that of each process of its own."""
        return measurement if self.alone else measurement.gathered(self.gather)

    def everywhere(self, flags: Tensor) -> Tensor:
        """Bool tensor of the same shape: what holds in every process."""
        if self.alone:
            return flags
        return self.gather(flags.unsqueeze(0).to(torch.uint8), 0).bool().all(0)

    def agree(self, holds: bool, device: torch.device) -> bool:
        """Whether something holds in every process. device: on which processes send tensors."""
        return holds if self.alone else bool(self.everywhere(torch.tensor([holds], device=device)))

    def of_first(self, text: str, device: torch.device) -> str:
        """The text that the first process gives. device: on which processes send tensors."""
        if self.alone:
            return text
        own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
        length = self.gather(torch.tensor([own.numel()], device=device), 0)[0]
        return bytes(self.gather(own, 0)[: int(length)].tolist()).decode()


def _itself(values: Tensor, dim: int) -> Tensor:
    return values


#: Heads of a model that one process has to itself.
ALONE = SharedHeads(0, 1, _itself)

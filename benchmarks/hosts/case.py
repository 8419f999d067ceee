# SPDX-License-Identifier: Apache-2.0
"""Case of a model: how to make it, and how to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

#: Queries and keys of the shortest call that a host may make sparse. Models here have 320 tokens.
LEAST = 100


@dataclass(frozen=True)
class Subject:
    """A model and what it is run on."""

    run: Callable[[], Sequence[Tensor]]
    """Runs it; gives outputs that are compared one by one, such as those of batch entries."""
    module: nn.Module
    """Module that torch.compile takes."""
    of: Any = None
    """Model or pipeline that the host's `enable` takes."""


@dataclass(frozen=True)
class Case:
    """One use of a model, for some hosts."""

    model: str
    name: str
    make: Callable[[], Subject]
    """Makes it anew, with the same weights and inputs."""
    compiled: bool = False
    fullgraph: bool = False
    """Whether torch.compile is to trace it whole."""
    alike: Callable[[], Subject] | None = None
    """Makes one that computes the same by PyTorch's function, where `make` calls none."""

    def prepared(self) -> Subject:
        """Subject as a host gets it, compiled where the case says so."""
        subject = self.make()
        if self.compiled or self.fullgraph:
            # The backend "eager" calls Python's functions, which a function mode catches again.
            subject.module.compile(backend="aot_eager", fullgraph=self.fullgraph)
        return subject

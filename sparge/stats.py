# SPDX-License-Identifier: Apache-2.0
"""Counts of attention: of what kernels keep and skip, and of a model's calls, where they come to us
one by one and not all can be sparse. Nothing waits for a GPU until somebody reads them."""

from __future__ import annotations

import itertools
from collections import Counter as Multiset
from collections.abc import Sequence
from contextvars import ContextVar
from enum import IntEnum
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .compiling import constant_in_graphs

NO_CALLS = (
    "No attention call came. Nothing ran, or the model does not call PyTorch's "
    "scaled_dot_product_attention. Exact calls of a compiled graph count when it is traced."
)
_numbers = itertools.count(1)
#: Counts that are no context's, by their name.
_named: WeakValueDictionary[str, CallStats] = WeakValueDictionary()


class Counter(IntEnum):
    """Indices of the counters: of query-key pairs, and of pairs of a query and a key block."""

    KEPT = 0
    VALID = 1
    PV_SKIPPED = 2
    KEPT_BLOCKS = 3


class AttentionStats:
    """Counts of what was kept and skipped, over all calls that were given this object.

    ``counters`` is an int64 tensor on ``device``, a number for each `Counter`. Make it once,
    outside the attention calls; reading a property synchronises with the device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.counters: Tensor = torch.zeros(len(Counter), dtype=torch.int64, device=device)
        self._calls = 0
        self._calls_in_graphs: Tensor = torch.zeros((), dtype=torch.int64, device=device)

    def reset(self) -> None:
        self.counters.zero_()
        self._calls = 0
        self._calls_in_graphs.zero_()

    def add_call(self) -> None:
        """Counts one call. In a graph of torch.compile the tensor counts: a number of Python would
        be a constant of the graph, which is traced anew for the next one."""
        if torch.compiler.is_compiling():
            self._calls_in_graphs += 1
        else:
            self._calls += 1

    @property
    def sparse_calls(self) -> int:
        """Number of calls that raised nothing."""
        return self._calls + int(self._calls_in_graphs)

    @property
    def density(self) -> float:
        """Kept pairs over valid pairs, forced blocks included; 1.0 before any call.

        Under a causal mask ``topk`` = t gives 2 t - t^2, 0.75 at 0.5, and more for what is forced:
        it is a share of all key blocks, and early queries see fewer than that.
        """
        return _density([self])

    @property
    def blocks_kept(self) -> int:
        """Key blocks that query blocks attended to, over all heads and batch entries. Blocks behind
        a key length or the diagonal are not among them."""
        return int(self.counters[Counter.KEPT_BLOCKS])

    @property
    def pv_skipped_share(self) -> float:
        """Share of the kept pairs whose exp and PV the filter skipped."""
        counts = self.counters.tolist()
        kept = counts[Counter.KEPT]
        return counts[Counter.PV_SKIPPED] / kept if kept else 0.0


def _density(stats: Sequence[AttentionStats]) -> float:
    """Share of the query-key pairs that were kept; 1.0 of none."""
    counts = [each.counters.tolist() for each in stats]
    valid = sum(each[Counter.VALID] for each in counts)
    return sum(each[Counter.KEPT] for each in counts) / valid if valid else 1.0


class CallStats:
    """Counts of sparse calls, and of those that stayed exact by reason.

    Sparse calls count each time they run. In a graph of torch.compile an exact call counts once,
    when it is traced: it is torch's own from then on. of_context: a graph that was traced in one
    context is for others too, so it counts in the one that is open.
    """

    def __init__(self, *, of_context: bool = False) -> None:
        self.name = "" if of_context else str(next(_numbers))
        """Name by which a graph that is traced finds these counts, empty for those of a context."""
        if self.name:
            _named[self.name] = self
        self.reasons: Multiset[str] = Multiset()
        """Calls that stayed exact, by the reason."""
        self.remark = ""
        """Reason why these counts are not those of their context; empty where they are."""
        self._by_device: dict[torch.device, AttentionStats] = {}

    def on(self, device: torch.device) -> AttentionStats | None:
        """Counters on `device`; None in a graph for a device that `prepare` had not seen."""
        found = self._by_device.get(device)
        if found is None and not torch.compiler.is_compiling():
            found = self._by_device[device] = AttentionStats(device)
        return found

    def prepare(self) -> None:
        """Makes the counters that a graph needs before it is traced: on the CPU, and on the current
        GPU where one is in use."""
        self.on(torch.device("cpu"))
        if torch.cuda.is_initialized():
            self.on(torch.device("cuda", torch.cuda.current_device()))

    @property
    def sparse_calls(self) -> int:
        return sum(stats.sparse_calls for stats in self._by_device.values())

    @property
    def dense_calls(self) -> int:
        return sum(self.reasons.values())

    @property
    def density(self) -> float:
        """Share of the query-key pairs that the sparse calls computed, all calls together; 1.0
        before any."""
        return _density(list(self._by_device.values()))

    def __str__(self) -> str:
        sparse, exact = self.sparse_calls, self.dense_calls
        if not sparse + exact:
            return self.remark or NO_CALLS
        computed = f" computed {self.density:.1%} of their attention" if sparse else ""
        lines = [f"{sparse} sparse calls{computed}"]
        lines += [f"{exact} calls stayed exact" + (":" if exact else "")]
        lines += [f"  {count} x {reason}" for reason, count in self.reasons.most_common()]
        lines += [self.remark] if self.remark else []
        return "\n".join(lines)


#: Counts of the contexts that the running code is in, by thread and by task, the innermost last.
opened: ContextVar[tuple[CallStats, ...]] = ContextVar("sparge_opened", default=())


def count_exact(stats: CallStats | None, reason: str) -> None:
    """Counts a call that stays exact."""
    if stats is None:
        return
    if torch.compiler.is_compiling():
        _count_traced(stats.name, reason)
    else:
        stats.reasons[reason] += 1


# It takes no counts but their name: a graph would be traced anew for those of another context.
@constant_in_graphs
def _count_traced(name: str, reason: str) -> None:
    stats = _named.get(name) if name else next(reversed(opened.get()), None)
    if stats is not None:
        stats.reasons[reason] += 1

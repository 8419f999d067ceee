# SPDX-License-Identifier: Apache-2.0
"""Whether the attention override of another node is a plain backend, which sparse calls may pass
by, or changes what attention means: a temperature, further keys, biases, a gain.

Nothing says so but its results. Until a layer's are known its calls are dense by the override, and
a few query rows of each are compared with exact attention of the same q, k and v. What was found is
read where a later step begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ..sparge.common.closures import leads_to
from ..sparge.common.failures import Failures
from ..sparge.errors import Unsupported
from ..sparge.session import Call, Dense, Step
from .comfyui import untracked_allocations
from .plain_rows import PlainRows

CHANGES = "another node changes this attention"
CHECKING = "checking another node's attention"

Override = Callable[..., Tensor]

#: One layer is compared again in one of so many sparse steps, for overrides that begin to act in
#: the middle of a run: of 30 layers that is less than a hundredth of the attention.
_AGAIN_EVERY = 4
#: Parts of names of backends that approximate: sparse ones, and one in 4 bits.
_APPROXIMATIONS = ("solattn", "sageattn3", "spassage")


class OverrideChecks:
    """Checks of one run: those of each override, device and model apart."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._layers: dict[tuple[int, torch.device, int], _Layers] = {}
        self._sparse_steps: dict[int, int] = {}
        self._lock = threading.Lock()

    def begin_pass(self, device: torch.device, step: Step) -> None:
        """Begins a pass on a device. Waits for it where calls were compared in an earlier step."""
        with self._lock:
            if step.why_dense is None:
                self._sparse_steps.setdefault(step.number, len(self._sparse_steps))
            found = list(self._layers.items())
        for (_, where, which), layers in found:
            if (where, which) == (device, step.model):
                layers.begin_step(step.number)

    def of(self, override: Override, rows: int, device: torch.device, step: Step) -> Check:
        """Check of the calls of a pass. rows: of a table of the model's layers."""
        key = id(override), device, step.model
        with self._lock:
            if key not in self._layers:
                self._layers[key] = _Layers(override, rows, device)
            layers, place = self._layers[key], self._sparse_steps.get(step.number)
        return Check(layers, step, layers.turn(place), self._failures)


@dataclass(frozen=True)
class Check:
    """Check of the calls of one pass."""

    layers: _Layers
    step: Step
    again: int | None
    """Row that is compared again in this step."""
    failures: Failures

    def why_dense(self, row: int) -> str | None:
        """Reason why a call of a layer is dense; None where the override is plain there."""
        row = self.layers.place(row)
        if row in self.layers.changed:
            return CHANGES
        known = self.layers.plain.get(row, set()).issuperset(self.step.prompts)
        return None if known and row != self.again else CHECKING

    def compared(self, row: int, call: Call, key_mask: Tensor | None, dense: Dense) -> Tensor:
        """Result of dense(), which is compared where it is not known what the override does, and in
        the last dense step once more. Never waits."""
        why, row = self.why_dense(row), self.layers.place(row)
        if why == CHANGES or (why is None and not self.step.is_last_dense):
            return dense()
        expected: PlainRows | None = None
        with self._caught():  # before the override has the tensors: it may change them in place
            expected = PlainRows.of(call, key_mask)
        out = dense()
        with self._caught():
            if expected is not None:
                self.layers.compare(row, expected, call, out, self.step)
        return out

    @contextmanager
    def _caught(self) -> Iterator[None]:
        """Context around work without which a layer stays dense."""
        with (
            suppress(torch.OutOfMemoryError),
            self.failures.caught("another node's attention was not checked"),
            untracked_allocations(),
        ):
            yield


class _Layers:
    """What is known of an override in the layers of a model, on one device."""

    def __init__(self, override: Override, rows: int, device: torch.device) -> None:
        self.changed: set[int] = set()
        """Rows in which it changes what attention means."""
        self.plain: dict[int, set[int]] = {}
        """Conditionings in whose calls it does not, by row."""
        self._override = override  # what has an id must live
        self._approximates = approximates(override)
        self._rows = rows
        with untracked_allocations():
            self._excess = torch.zeros(rows + 1, device=device)
        self._compared: dict[int, set[int]] = {}
        """Conditionings whose calls were compared in `_step`, by row."""
        self._step = -1

    def place(self, row: int) -> int:
        """Row in the tables: calls for which there is no room share the last one."""
        return min(row, self._rows)

    def turn(self, sparse_step: int | None) -> int | None:
        """Row that is compared again in a sparse step, counted from 0; None for none."""
        if sparse_step is None or sparse_step % _AGAIN_EVERY != 1 or not self.plain:
            return None
        known = sorted(self.plain)
        return known[sparse_step // _AGAIN_EVERY % len(known)]

    def compare(self, row: int, expected: PlainRows, call: Call, out: Tensor, step: Step) -> None:
        try:
            excess = expected.excess(call.result_heads_first(out), self._approximates)
        except Unsupported:  # it gave another shape
            excess = torch.full_like(self._excess[0], torch.inf)
        self._excess[row] = torch.maximum(self._excess[row], excess)
        self._step = step.number
        self._compared.setdefault(row, set()).update(step.prompts)

    def begin_step(self, step: int) -> None:
        """Reads what was found in an earlier step."""
        if not self._compared or step == self._step:
            return
        compared, self._compared = self._compared, {}
        excess = self._excess.tolist()
        found = {row for row in compared if excess[row] > 1} - self.changed
        if found & self.plain.keys():  # it has begun to act, and may have in every layer
            self.plain = {}
        self.changed |= found
        for row, conditionings in compared.items():
            if row not in self.changed:
                self.plain.setdefault(row, set()).update(conditionings)
            else:
                self.plain.pop(row, None)


def approximates(override: Override) -> bool:
    """Whether an override is known for an approximation by the names that its code holds."""
    return leads_to(override, _names_an_approximation)


def _names_an_approximation(item: Any) -> bool:
    called = item if isinstance(item, FunctionType) else vars(type(item)).get("__call__")
    if not isinstance(called, FunctionType):
        return False
    helpers = (called.__globals__.get(name) for name in called.__code__.co_names)
    own = (x for x in helpers if isinstance(x, FunctionType) and x.__module__ == called.__module__)
    names = [called.__module__ or ""]
    for function in (called, *own):
        names += [function.__qualname__, *_names(function.__code__)]
    told = (name.lower().replace("_", "").replace("-", "") for name in names)
    return any(part in name for name in told for part in _APPROXIMATIONS)


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)

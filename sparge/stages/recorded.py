# SPDX-License-Identifier: Apache-2.0
"""Launches of a call, recorded in its first run and queued again with other tensors.

Preparing a launch takes the host ten times as long as queueing it (docs/experiments.md, Host time
of a call). A recording keeps the parameter blocks. Where one holds an address of a tensor of the
call, it notes the tensor and the offset, and writes the address of another tensor there before each
run.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from ctypes import Array, Structure, addressof, c_uint64, c_void_p, sizeof
from dataclasses import dataclass, field

from torch import Tensor

from ..kernels import Kernel

_WORD = sizeof(c_void_p)


@dataclass(frozen=True, eq=False)
class Launch:
    """Launch of a kernel on its device."""

    kernel: Kernel
    grid: tuple[int, int, int]
    params: Structure
    extra_shared: int = 0

    def queue(self, stream: int) -> None:
        self.kernel.launch(self.grid, self.params, self.extra_shared, stream)


class _Noted(threading.local):
    """Launches that this thread notes; None where it notes none."""

    launches: list[Launch] | None = None


_noted = _Noted()


def note(launch: Launch) -> None:
    """Notes a launch where this thread's call is being recorded."""
    if _noted.launches is not None:
        _noted.launches.append(launch)


@contextlib.contextmanager
def noting() -> Iterator[list[Launch]]:
    """Context that notes the launches of this thread in a list."""
    _noted.launches = launches = []
    try:
        yield launches
    finally:
        _noted.launches = None


@dataclass(frozen=True, eq=False)
class _Address:
    """Place of an address in a parameter block, and what it is the address of."""

    word: int
    """Index among the words of the block."""
    tensor: int
    """Index among the tensors of the call."""
    offset: int
    """Bytes from the start of that tensor."""


@dataclass(frozen=True, eq=False)
class Recording:
    """Launches of a call of other tensors, which have the sizes, strides and alignment of those
    recorded."""

    steps: list[tuple[Launch, list[_Address]]]
    kept: tuple[Tensor, ...]
    """Tensors that all runs share, which must not be freed."""
    _running: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def of(
        cls, launches: Sequence[Launch], tensors: Sequence[Tensor], kept: Sequence[Tensor] = ()
    ) -> Recording | None:
        """Makes a recording of launches on tensors, each without gaps or known by its start.

        None where tensors share a start, so that an address does not tell which of them it is of.
        """
        if len({tensor.data_ptr() for tensor in tensors}) < len(tensors):
            return None
        steps = []
        for launch in launches:
            words = _words_of(launch.params)
            found = [(at, words[at]) for at in _pointers(type(launch.params)) if words[at]]
            places = [_place(at, value, tensors) for at, value in found]
            unknown = [value for (_, value), at in zip(found, places, strict=True) if at is None]
            assert all(any(_holds(tensor, value) for tensor in kept) for value in unknown)
            steps.append((launch, [place for place in places if place is not None]))
        return cls(steps, tuple(kept))

    def run(self, tensors: Sequence[Tensor], stream: int) -> None:
        """Queues the launches on `stream`, on tensors in the order of those recorded."""
        starts = [tensor.data_ptr() for tensor in tensors]
        with self._running:
            for launch, addresses in self.steps:
                words = _words_of(launch.params)
                for place in addresses:
                    words[place.word] = starts[place.tensor] + place.offset
                launch.queue(stream)


def _words_of(params: Structure) -> Array[c_uint64]:
    """Words of a parameter block, to read and write."""
    return (c_uint64 * (sizeof(params) // _WORD)).from_address(addressof(params))


@functools.cache
def _pointers(kind: type[Structure]) -> tuple[int, ...]:
    """Indices of the words of a parameter block that are addresses."""
    found: list[int] = []
    for name, of in ((entry[0], entry[1]) for entry in kind._fields_):
        first = getattr(kind, name).offset // _WORD
        if of is c_void_p:
            found.append(first)
        elif isinstance(of, type) and issubclass(of, Structure):
            found.extend(first + at for at in _pointers(of))
    return tuple(found)


def _place(word: int, value: int, tensors: Sequence[Tensor]) -> _Address | None:
    """Tensor that an address is of: the one that starts there, else the one that holds it."""
    for holds in (_starts, _holds):
        for index, tensor in enumerate(tensors):
            if holds(tensor, value):
                return _Address(word, index, value - tensor.data_ptr())
    return None


def _starts(tensor: Tensor, value: int) -> bool:
    return tensor.data_ptr() == value


def _holds(tensor: Tensor, value: int) -> bool:
    start = tensor.data_ptr()
    return tensor.is_contiguous() and start <= value < start + tensor.nbytes

# SPDX-License-Identifier: Apache-2.0
"""Operand types of 8-bit calls on GPUs whose target has several (`variants`).

They are the target's own until others are chosen, and from the first call on they stay until this
process ends: calls that were compiled or recorded have theirs for good, and all calls of a run
shall have the same. A choice that comes later counts from the next start on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from ..common.compiling import constant_in_graphs
from .spec import HEAD_DIMS, Element, variants


class Place(NamedTuple):  # a tuple: each call asks for some, and its hash is that of C
    """What a choice is for: a CUDA device by its number, the target, and the kernels' head_dim."""

    index: int
    arch: str
    head_dim: int


class _Tried(threading.local):
    """Operand types that this thread tries, by head_dim."""

    elements: Mapping[int, Element] | None = None


class Choices:
    """Chosen elements, and those that calls use."""

    def __init__(self) -> None:
        self._chosen: dict[Place, Element] = {}
        self._used: dict[Place, Element] = {}
        self._tried = _Tried()
        self._lock = threading.Lock()

    def choose(self, place: Place, element: Element) -> Element:
        """Element that calls use from now on: the given one, unless they use another already.

        Raises ValueError for one that is no variant of the target.
        """
        if element not in variants(place.arch):
            known = ", ".join(each.name for each in variants(place.arch))
            raise ValueError(f"{element.name} does not serve 8-bit calls of {place.arch}: {known}")
        with self._lock:
            self._chosen[place] = element
            return self._used.get(place, element)

    def use(self, place: Place) -> Element:
        """Element of a call that is about to be launched or traced."""
        if self._tried.elements is not None:
            return self._tried.elements[place.head_dim]
        found = self._used.get(place)
        if found is None:
            with self._lock:
                own = variants(place.arch)[0]
                found = self._used.setdefault(place, self._chosen.get(place, own))
        return found

    @contextmanager
    def trying(self, elements: Mapping[int, Element]) -> Iterator[None]:
        """Calls of this thread use these elements, by head_dim, inside; none of them lasts."""
        before, self._tried.elements = self._tried.elements, elements
        try:
            yield
        finally:
            self._tried.elements = before


#: By their numbers; torch 2.11 does not trace `Element(number)`.
_ELEMENTS = tuple(sorted(Element))
#: Those of this process.
_choices = Choices()


def choose(index: int, arch: str, elements: Mapping[int, Element]) -> dict[int, Element]:
    """Chooses elements by head_dim; returns those that calls use. Raises as `Choices.choose`."""
    return {
        head_dim: _choices.choose(Place(index, arch, head_dim), element)
        for head_dim, element in elements.items()
    }


def trying(elements: Mapping[int, Element]) -> AbstractContextManager[None]:
    """Context of `Choices.trying`."""
    return _choices.trying(elements)


def chosen_element(device: torch.device, arch: str, channels: int) -> Element:
    """Element of an 8-bit call with so many channels; from then on it stays."""
    head_dim = next(size for size in HEAD_DIMS if channels <= size)
    return _ELEMENTS[_number(device, arch, head_dim)]


# A constant of a graph cannot be an Element.
@constant_in_graphs
def _number(device: torch.device, arch: str, head_dim: int) -> int:
    return int(_choices.use(Place(device.index or 0, arch, head_dim)))

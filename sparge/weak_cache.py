# SPDX-License-Identifier: Apache-2.0
"""Facts found out about a tensor, for as long as the tensor lives and PyTorch says that it was not
changed. Of a tensor whose changes do not show nothing is remembered."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

Found = TypeVar("Found")


class _Entry(NamedTuple, Generic[Found]):
    tensor: weakref.ref[Tensor]
    state: tuple[object, ...]
    found: Found


class WeakTensorCache(Generic[Found]):
    """Cache keyed by the object, not by values: a tensor has no hash of those. Holds at most
    `size`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[int, _Entry[Found]] = OrderedDict()
        # Reentrant: a tensor may die, and tell of it, in the middle of a change by the same thread.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tensor: Tensor) -> Found | None:
        with self._lock:
            entry = self._entries.get(id(tensor))
            if entry is None or entry.tensor() is not tensor or entry.state != _state(tensor):
                return None
            self._entries.move_to_end(id(tensor))
            return entry.found

    def add(self, tensor: Tensor, found: Found) -> Found:
        if not shows_changes(tensor):
            return found
        key = id(tensor)

        def forget(reference: weakref.ref[Tensor]) -> None:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None and entry.tensor is reference:
                    del self._entries[key]

        entry = _Entry(weakref.ref(tensor, forget), _state(tensor), found)
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = entry
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        return found


def shows_changes(tensor: Tensor) -> bool:
    """Whether PyTorch counts the changes of a tensor. It does not for those that were made in
    inference mode, and NumPy may write to one on the CPU."""
    return tensor.device.type != "cpu" and not tensor.is_inference()


def _state(tensor: Tensor) -> tuple[object, ...]:
    """State that differs after a change in place."""
    return (
        tensor._version,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )

# SPDX-License-Identifier: Apache-2.0
"""Facts found out about a tensor, for as long as the tensor lives and PyTorch says that it was not
changed. Of a tensor whose changes do not show nothing is remembered."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Found = TypeVar("Found")


class WeakTensorCache(Generic[Found]):
    """Cache keyed by the object, not by values: a tensor has no hash of those."""

    def __init__(self) -> None:
        self._entries = WeakTensorKeyDictionary()

    def get(self, tensor: Tensor) -> Found | None:
        entry = self._entries.get(tensor)
        if entry is None:
            return None
        state, found = entry
        return found if state == _state(tensor) else None

    def add(self, tensor: Tensor, found: Found) -> Found:
        if shows_changes(tensor):
            self._entries[tensor] = _state(tensor), found
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

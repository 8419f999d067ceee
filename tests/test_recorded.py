# SPDX-License-Identifier: Apache-2.0
"""Recorded launches: which words of a parameter block follow which tensor."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_void_p
from typing import Any

import pytest
import torch

from sparge.kernels.params import TensorView
from sparge.stages.recorded import Launch, Recording, note, noting


class Params(Structure):
    __slots__ = ()
    _fields_ = (
        ("view", TensorView),
        ("inside", c_void_p),
        ("nothing", c_void_p),
        ("map", c_void_p),
        ("number", c_int32),
    )


class Kernel:
    """Notes what it is launched with."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def launch(self, grid: object, params: Params, shared: int, stream: int) -> None:
        read = (params.view.data, params.inside, params.nothing, params.map, params.number)
        self.told.append((grid, read, shared, stream))


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """Every other row of a tensor, and a workspace."""
    return torch.zeros(8, 4)[::2], torch.zeros(256, dtype=torch.uint8)


def recorded(kernel: Kernel, x: torch.Tensor, workspace: torch.Tensor, map_: torch.Tensor) -> Any:
    view = TensorView(data=x.data_ptr(), token_stride=8)
    params = Params(view, workspace.data_ptr() + 64, None, map_.data_ptr(), 7)
    launch = Launch(kernel, (1, 2, 3), params, 5)  # pyright: ignore[reportArgumentType]
    return Recording.of([launch], (x, workspace), (map_,))


def test_addresses_follow_the_tensors() -> None:
    kernel, map_ = Kernel(), torch.zeros(4)
    recording = recorded(kernel, *tensors(), map_)
    for stream in (11, 12):
        x, workspace = tensors()
        recording.run((x, workspace), stream)
        read = (x.data_ptr(), workspace.data_ptr() + 64, None, map_.data_ptr(), 7)
        assert kernel.told.pop() == ((1, 2, 3), read, 5, stream)
    assert not kernel.told, "recording launches nothing"


def test_what_cannot_be_told_apart_is_not_recorded() -> None:
    x, workspace = tensors()
    map_ = torch.zeros(4)
    view = TensorView(data=x.data_ptr())
    launch = Launch(Kernel(), (1, 1, 1), Params(view, None, None, map_.data_ptr(), 0))  # pyright: ignore[reportArgumentType]
    assert Recording.of([launch], (x, x.clone()), (map_,)) is not None
    assert Recording.of([launch], (x, x), (map_,)) is None
    with pytest.raises(AssertionError):
        Recording.of([launch], (x, workspace))  # the map is freed while launches read it


def test_launches_are_noted_in_their_context_alone() -> None:
    launch = Launch(Kernel(), (1, 1, 1), Params())  # pyright: ignore[reportArgumentType]
    note(launch)
    with noting() as launches:
        note(launch)
    note(launch)
    assert launches == [launch]

# SPDX-License-Identifier: Apache-2.0
"""GPU that a machine without one pretends to have: it notes what is loaded and launched, and
computes nothing."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, NamedTuple

import pytest

from sparge import KernelBuildError
from sparge.kernels import Capability, KernelSpec, device, loader
from sparge.kernels.params import PARAMS, SIZES
from sparge.stages import launches, prepared

_SIZES = {"means": (4,), "route": (16, 16, 1000), "attend": (1,), "score": (16, 8, 1000)}
_ASK = (
    *("attention", "kernels.device", "kernels.loader", "session.measure"),
    *("stages.measuring", "stages.op", "stages.prepared"),
)


class Launched(NamedTuple):
    spec: KernelSpec
    grid: tuple[int, int, int]
    params: Any
    extra_shared: int


class PretendedGpu:
    """GPU of a target, or an H200 whose target is found as a real one's. `missing` (entry, target)
    do not compile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arch: str | None) -> None:
        self.loaded: list[KernelSpec] = []
        self.launched: list[Launched] = []
        self.loads_at_launch: list[int] = []
        self.missing: set[tuple[str, str]] = set()
        capability = Capability(True, arch=arch or "")
        monkeypatch.setattr(device, "_ask_cuda", lambda _: device.arch_for((9, 0), "NVIDIA H200"))

        ask = device.capabilities

        def capabilities(_: object) -> Capability:
            return capability if arch else ask(0)

        for name in _ASK:
            module = importlib.import_module(f"sparge.{name}")
            monkeypatch.setattr(module, "capabilities", capabilities)
        monkeypatch.setattr(loader, "_kernels", {})
        monkeypatch.setattr(loader, "_load", self._load)
        monkeypatch.setattr(launches, "multiprocessors", lambda _: 132)
        for module in (launches, prepared):
            monkeypatch.setattr(module, "raw_stream", lambda _: 0)

    def _load(self, spec: KernelSpec, index: int) -> Any:
        self.loaded.append(spec)
        if (spec.entry, spec.arch) in self.missing:
            raise KernelBuildError(f"Kernel {spec.id} does not compile.", "not today")
        return PretendedKernel(self, spec)

    def of_entry(self, entry: str) -> Launched:
        """The one launch of an entry."""
        (found,) = (each for each in self.launched if each.spec.entry == entry)
        return found


class PretendedKernel:
    static_shared, device_index = 20_000, 0

    def __init__(self, gpu: PretendedGpu, spec: KernelSpec) -> None:
        self.gpu, self.spec = gpu, spec
        self.sizes = SIZES[spec.entry](*_SIZES[spec.entry]) if spec.entry in SIZES else None

    def allow_shared(self, extra_shared: int) -> None:
        pass

    def launch(self, grid: Any, pointer: int, extra_shared: int, stream: int) -> None:
        address = ctypes.c_uint64.from_address(pointer).value
        params = PARAMS[self.spec.entry].from_buffer_copy(
            ctypes.string_at(address, ctypes.sizeof(PARAMS[self.spec.entry]))
        )
        self.gpu.launched.append(Launched(self.spec, grid, params, extra_shared))
        self.gpu.loads_at_launch.append(len(self.gpu.loaded))

# SPDX-License-Identifier: Apache-2.0
"""Capabilities of a device: what it can run, and if nothing, why, in one sentence for the user."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from ..compiling import constant_in_graphs
from ..reasons import Reason
from . import driver, nvrtc
from .spec import ARCHS

#: Compute capability -> target that runs on it.
SERVED_BY: dict[tuple[int, int], str] = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_80",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}


NOTHING = Reason("")


@dataclass(frozen=True)
class Capability:
    """``arch`` is the target to build for, "" when not ``usable``; ``reason`` is "" when it is."""

    usable: bool
    reason: Reason = NOTHING
    arch: str = ""


_NVIDIA_ONLY = "the kernels are NVIDIA machine code."
_known: dict[int, Capability] = {}
_lock = threading.Lock()


@constant_in_graphs
def capabilities(device: torch.device | str | int) -> Capability:
    """Returns what the kernels can do on ``device``. Never raises; asked once per CUDA device."""
    if isinstance(device, torch.device) and device.type == "cuda" and device.index in _known:
        return _known[device.index]
    try:
        place = as_device(device)
        if place.type != "cuda":
            known = torch.version.cuda or torch.version.hip or place.type != "cpu"
            kind = "no NVIDIA GPU" if known else "PyTorch for CPUs"
            return _unusable(kind, f"{_called(place)} is not supported: {_NVIDIA_ONLY}")
        if torch.version.hip:
            sentence = f"AMD GPUs (ROCm) are not supported: {_NVIDIA_ONLY}"
            return _unusable("no NVIDIA GPU", sentence)
        index = cuda_index(place)
        with _lock:
            if index not in _known:
                _known[index] = _ask_cuda(index)
            return _known[index]
    except Exception as error:  # the promise is a reason, whatever a broken installation does
        return _unusable("broken GPU", f"The device {device} could not be examined: {error}")


def as_device(device: torch.device | str | int) -> torch.device:
    """A bare number means a CUDA device."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def cuda_index(device: torch.device) -> int:
    """The device's number; for plain "cuda" the current one (0 where CUDA cannot start)."""
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def compiler() -> nvrtc.Nvrtc:
    """The NVRTC that fits this torch. Raises NvrtcNotFoundError."""
    built_for = torch.version.cuda
    return nvrtc.load(int(built_for.split(".")[0]) if built_for else None)


def _ask_cuda(index: int) -> Capability:
    if torch.version.cuda is None:
        sentence = "This PyTorch is built without CUDA: install a CUDA build of PyTorch."
        return _unusable("no CUDA", sentence)
    try:
        driver.library()
    except driver.DriverNotFoundError as error:
        return _unusable("no GPU", f"No NVIDIA GPU can be used: {error}.")
    if not torch.cuda.is_available():
        return _unusable(
            "no GPU",
            f"PyTorch for CUDA {torch.version.cuda} finds no GPU it can use: "
            "check that one is present and that the NVIDIA driver is new enough.",
        )
    if index >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        return _unusable("no GPU", f"There is no GPU {index}: this machine has {found}.")
    name = torch.cuda.get_device_name(index)
    return arch_for(torch.cuda.get_device_capability(index), name)


def arch_for(capability: tuple[int, int], name: str) -> Capability:
    """The target for a GPU called ``name``, given the NVRTC at hand."""
    major, minor = capability
    if major < 8:
        return _unusable(
            "old GPU",
            f"{name.removeprefix('NVIDIA ')} is too old: it has compute capability "
            f"{major}.{minor}, and the kernels need 8.0 (Ampere, RTX 30) or newer.",
        )
    if (target := SERVED_BY.get(capability)) is None:
        sentence = f"{name} (compute capability {major}.{minor}) is not supported yet."
        return _unusable("new GPU", sentence)
    try:
        nvrtc_found = compiler()
    except nvrtc.NvrtcNotFoundError as error:
        return _unusable("no compiler", str(error))
    arch = ARCHS[target]
    if nvrtc_found.version >= arch.needs and arch.number in nvrtc_found.archs:
        return Capability(True, arch=arch.name)
    have, need = ("{}.{}".format(*v) for v in (nvrtc_found.version, arch.needs))
    return _unusable(
        "old PyTorch",
        f"{name} needs the CUDA {need} compiler (NVRTC) or newer, but this PyTorch brings {have}: "
        "update PyTorch.",
    )


def _called(device: torch.device) -> str:
    names = {"cpu": "The CPU", "mps": "Apple's GPU (MPS)", "xpu": "Intel's GPU (XPU)"}
    return names.get(device.type, f"The device type {device.type!r}")


def _unusable(kind: str, sentence: str) -> Capability:
    return Capability(False, Reason(sentence, kind))

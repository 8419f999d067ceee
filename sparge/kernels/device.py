# SPDX-License-Identifier: Apache-2.0
"""Capabilities of a device: what it can run, and if nothing, why, in one sentence for the user."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import torch

from ..compiling import constant_in_graphs
from ..errors import KernelBuildError
from ..reasons import Reason
from . import driver, nvrtc
from .spec import ARCHS

logger = logging.getLogger("sparge")

#: Compute capability -> targets that run on it, best first; the first one is used that NVRTC knows
#: and whose kernels compile, as far as was tried (`pass_over`).
SERVED_BY: dict[tuple[int, int], tuple[str, ...]] = {
    (8, 0): ("sm_80",),
    (8, 6): ("sm_86", "sm_80"),
    (8, 7): ("sm_80",),
    (8, 9): ("sm_89", "sm_80"),
    (9, 0): ("sm_90a", "sm_90"),
    (10, 0): ("sm_100a",),
    (10, 3): ("sm_103a",),
    (12, 0): ("sm_120a",),
    (12, 1): ("sm_121a",),
}


NOTHING = Reason("")


@dataclass(frozen=True)
class Capability:
    """``arch`` is the target to build for, "" when not ``usable``; ``reason`` is "" when it is.

    ``fallback`` is the target that takes over should a kernel of ``arch`` not compile, "" where
    none is left. ``note`` is for the user where a better target than ``arch`` exists.
    """

    usable: bool
    reason: Reason = NOTHING
    arch: str = ""
    fallback: str = ""
    note: Reason = NOTHING


_NVIDIA_ONLY = "the kernels are NVIDIA machine code."
_known: dict[int, Capability] = {}
_refused: set[str] = set()
_in_use: set[str] = set()
#: Held while any of them changes: what is known never lags behind what was refused.
_lock = threading.RLock()


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


def pass_over(arch: str, device: torch.device | str | int, why: KernelBuildError) -> bool:
    """Whether another target serves ``device`` from now on; a kernel of ``arch`` fails to build.

    ``arch`` is then left out for all GPUs until this process ends. False where no other is left,
    calls use this one already (`use`), or no compiler was there to refuse anything: ``why`` is for
    whoever asked, then.
    """
    if not why.log:
        return False
    with _lock:
        now = capabilities(device)
        if now.arch != arch:
            return now.usable  # another thread found out before
        if not now.fallback or arch in _in_use:
            return False
        _refused.add(arch)
        _known.clear()
    logger.warning("Kernels for %s, slower ones, replace those for %s. %s", now.fallback, arch, why)
    return True


def use(arch: str, device: torch.device | str | int) -> bool:
    """Whether ``arch`` still serves ``device``, and then does until this process ends: targets
    differ in operand types and layouts, so a call that began on one cannot end on another."""
    if arch in _in_use:
        return True
    with _lock:
        if capabilities(device).arch != arch:
            return False
        _in_use.add(arch)
        return True


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
    """The target for a GPU called ``name``, given the NVRTC at hand and what it refused."""
    major, minor = capability
    if major < 8:
        return _unusable(
            "old GPU",
            f"{name.removeprefix('NVIDIA ')} is too old: it has compute capability "
            f"{major}.{minor}, and the kernels need 8.0 (Ampere, RTX 30) or newer.",
        )
    targets = SERVED_BY.get(capability)
    if targets is None:
        sentence = f"{name} (compute capability {major}.{minor}) is not supported yet."
        return _unusable("new GPU", sentence)
    try:
        nvrtc_found = compiler()
    except nvrtc.NvrtcNotFoundError as error:
        return _unusable("no compiler", str(error))
    known = [
        arch.name
        for arch in map(ARCHS.__getitem__, targets)
        if nvrtc_found.version >= arch.needs and arch.number in nvrtc_found.archs
    ]
    if known:
        arch, *others = [name for name in known if name not in _refused] or known[-1:]
        return Capability(True, NOTHING, arch, "".join(others[:1]), _note(targets[0], arch))
    have, need = ("{}.{}".format(*v) for v in (nvrtc_found.version, ARCHS[targets[0]].needs))
    return _unusable(
        "old PyTorch",
        f"{name} needs the CUDA {need} compiler (NVRTC) or newer, but this PyTorch brings {have}: "
        "update PyTorch.",
    )


def _note(best: str, arch: str) -> Reason:
    if arch == best:
        return NOTHING
    if best in _refused:
        return Reason(
            f"The kernels for {best} did not compile (see the log), so slower ones for {arch} run.",
            "refused kernels",
        )
    sentence = f"This PyTorch's NVRTC does not know {best}, so slower kernels for {arch} run."
    return Reason(sentence, "slower kernels")


def _called(device: torch.device) -> str:
    names = {"cpu": "The CPU", "mps": "Apple's GPU (MPS)", "xpu": "Intel's GPU (XPU)"}
    return names.get(device.type, f"The device type {device.type!r}")


def _unusable(kind: str, sentence: str) -> Capability:
    return Capability(False, Reason(sentence, kind))

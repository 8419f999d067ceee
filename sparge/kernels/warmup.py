# SPDX-License-Identifier: Apache-2.0
"""Warm-up: kernels that a run needs and this machine lacks are compiled while a framework still
loads its model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ..errors import KernelBuildError, Unsupported
from ..reasons import Reason
from .device import capabilities
from .driver import DriverError
from .loader import warm
from .spec import HEAD_DIMS, KernelSpec, Source, native_element, native_specs

logger = logging.getLogger("sparge")

KERNEL_DID_NOT_COMPILE = Reason("a kernel did not compile (see the log)", "compile")
KERNEL_DID_NOT_LOAD = Reason("the driver did not take a kernel (see the log)", "load")
NO_KERNELS = Reason("an error while kernels were made ready (see the log)", "not ready")

Show = Callable[[str], None]

#: Seconds between two looks at the Cancel button while a run waits.
_POLL_SECONDS = 0.1
#: Seconds that loading from the disk stays below; only a compilation is worth telling the user
#: about.
_WORTH_TELLING_SECONDS = 1.0


class Needs(NamedTuple):
    """Facts of q, k and v that kernels follow from; None where they are not known before a call."""

    head_dim: int | None = None
    dtype: torch.dtype | None = None

    @property
    def head_dims(self) -> Sequence[int]:
        """Head dimensions of the kernels that serve it."""
        if self.head_dim is None:
            return HEAD_DIMS
        return [built for built in HEAD_DIMS if self.head_dim <= built][:1]


#: Of a model that does not say.
UNKNOWN = Needs()


def eight_bit_specs(arch: str, needs: Needs = UNKNOWN) -> list[KernelSpec]:
    """Kernels of the 8-bit precision. Those with the PV filter are compiled when a call asks for
    them."""
    dtypes = (torch.bfloat16, torch.float16) if needs.dtype is None else (needs.dtype,)
    elements = {native_element(arch, False, dtype) for dtype in dtypes}
    sources = {Source.of(dtype) for dtype in dtypes}
    return [
        spec
        for spec in native_specs(arch)
        if (spec.element in elements or not spec.reads_element)
        and not spec.pv_filter
        and spec.head_dim in needs.head_dims
        and (spec.entry != "quantize" or spec.source in sources)
    ]


def why_no_kernel(error: KernelBuildError | DriverError) -> Reason:
    """Reason for the user that a kernel cannot be had; the log gets the whole error."""
    logger.error("[Sparge] %s", error)
    return KERNEL_DID_NOT_LOAD if isinstance(error, DriverError) else KERNEL_DID_NOT_COMPILE


class Warmup:
    """Compiles and loads kernels of one device in a thread; wait() before the first call."""

    def __init__(self, device: torch.device, show: Show, needs: Needs) -> None:
        self._device, self._needs = device, needs
        self._show = show
        self._started = time.perf_counter()
        self._ready = ""  # how many kernels are
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="sparge-warmup", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            warm(self._device, partial(eight_bit_specs, needs=self._needs), self._progress)
            arch = capabilities(self._device).arch
            logger.info("[Sparge] attention on %s by kernels for %s", self._device, arch)
        except BaseException as error:  # handed to whoever waits
            self._error = error

    def _progress(self, done: int, total: int, name: str) -> None:
        self._ready = f"{done} of {total}, "
        seconds = self._tell()
        if done == total and seconds > _WORTH_TELLING_SECONDS:
            logger.info("[Sparge] %d kernels are ready after %.1f s", total, seconds)

    def _tell(self) -> float:
        """Shows how far it is, where that is worth telling. Returns the seconds so far."""
        seconds = time.perf_counter() - self._started
        if seconds > _WORTH_TELLING_SECONDS:
            self._show(f"Compiling kernels for this GPU, once: {self._ready}{seconds:.0f} s")
        return seconds

    def wait(self, check_cancelled: Callable[[], None]) -> Reason | None:
        """Blocks until done. Returns why the kernels cannot be used, or None when they can."""
        told = 0.0
        while self._thread.is_alive():
            check_cancelled()
            self._thread.join(_POLL_SECONDS)
            if time.perf_counter() - told > _WORTH_TELLING_SECONDS:
                self._tell()
                told = time.perf_counter()
        if isinstance(self._error, Unsupported):
            return Reason(*self._error.args)
        if isinstance(self._error, KernelBuildError | DriverError):
            return why_no_kernel(self._error)
        if self._error is None:
            return None
        if not isinstance(self._error, Exception):
            raise self._error
        logger.error("[Sparge] %s. Please report it.", NO_KERNELS, exc_info=self._error)
        return NO_KERNELS

    @property
    def may_go_better(self) -> bool:
        """Whether a second try may go better: it failed, and not for what stays as it is, a GPU
        that is too old or code that the compiler refuses. Memory may be free again by now, and a
        disk."""
        if self._error is None or isinstance(self._error, Unsupported):
            return False
        return not (isinstance(self._error, KernelBuildError) and self._error.log)


_warmups: dict[tuple[torch.device, Needs], Warmup] = {}
_lock = threading.Lock()


def warm_up(device: torch.device, show: Show, needs: Needs = UNKNOWN) -> Warmup:
    """Warm-up of a device for what a model needs, started by whoever asks first in this process,
    and once more after one that failed and may not fail again."""
    with _lock:
        kept = _warmups.get((device, needs))
        if kept is None or kept.may_go_better:
            kept = _warmups[device, needs] = Warmup(device, show, needs)
        return kept

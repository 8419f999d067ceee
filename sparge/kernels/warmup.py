# SPDX-License-Identifier: Apache-2.0
"""Warm-up: kernels that this machine lacks are compiled while a host still loads its model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from ..errors import KernelBuildError, Unsupported
from .device import capabilities
from .driver import DriverError
from .loader import warm
from .spec import (
    KernelSpec,
    eight_bit_element,
    native_specs,
    pv_filter_saves,
)

logger = logging.getLogger("sparge")

KERNEL_DID_NOT_COMPILE = "a kernel did not compile (see the log)"
KERNEL_DID_NOT_LOAD = "the driver did not take a kernel (see the log)"
NO_KERNELS = "an error while kernels were made ready (see the log)"

Show = Callable[[str], None]

#: Seconds between two looks at the Cancel button while a run waits.
_POLL_SECONDS = 0.1
#: Seconds that loading from the disk stays below; only a compilation is worth telling the user
#: about.
_WORTH_TELLING_SECONDS = 1.0


def eight_bit_specs(arch: str) -> list[KernelSpec]:
    """Kernels of the 8-bit precision for both head_dims, with the PV filter where it saves time."""
    own = eight_bit_element(arch)
    return [
        spec
        for spec in native_specs(arch)
        if (spec.element is own or not spec.reads_element)
        and (pv_filter_saves(arch) or not spec.pv_filter)
    ]


class Warmup:
    """Compiles and loads the kernels of one device in a thread; wait() before the first call."""

    def __init__(self, device: torch.device, show: Show) -> None:
        self._device = device
        self._show = show
        self._started = time.perf_counter()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="sparge-warmup", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            warm(self._device, eight_bit_specs, self._progress)
            arch = capabilities(self._device).arch
            logger.info("[Sparge] attention on %s by kernels for %s", self._device, arch)
        except BaseException as error:  # handed to whoever waits
            self._error = error

    def _progress(self, done: int, total: int, name: str) -> None:
        seconds = time.perf_counter() - self._started
        if seconds > _WORTH_TELLING_SECONDS:
            self._show(f"Compiling kernels for this GPU, once: {done} of {total}, {seconds:.0f} s")
            if done == total:
                logger.info("[Sparge] %d kernels are ready after %.1f s", total, seconds)

    def wait(self, check_cancelled: Callable[[], None]) -> str | None:
        """Blocks until done. Returns why the kernels cannot be used, or None when they can."""
        while self._thread.is_alive():
            check_cancelled()
            self._thread.join(_POLL_SECONDS)
        if isinstance(self._error, Unsupported):
            return self._error.reason
        if isinstance(self._error, KernelBuildError | DriverError):
            logger.error("[Sparge] %s", self._error)
            compiled = isinstance(self._error, DriverError)
            return KERNEL_DID_NOT_LOAD if compiled else KERNEL_DID_NOT_COMPILE
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


_warmups: dict[torch.device, Warmup] = {}
_lock = threading.Lock()


def warm_up(device: torch.device, show: Show) -> Warmup:
    """Warm-up of a device, started by whoever asks first in this process, and once more after one
    that failed and may not fail again."""
    with _lock:
        kept = _warmups.get(device)
        if kept is None or kept.may_go_better:
            kept = _warmups[device] = Warmup(device, show)
        return kept

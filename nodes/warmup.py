# SPDX-License-Identifier: Apache-2.0
"""Kernels that this machine lacks are compiled while ComfyUI still loads the model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from ..sparge import KernelBuildError, kernels

logger = logging.getLogger("sparge")

KERNEL_DID_NOT_COMPILE = "a kernel did not compile (see the log)"

Show = Callable[[str], None]

#: Seconds between two looks at the Cancel button while a run waits.
_POLL_SECONDS = 0.1


class Warmup:
    """Compiles and loads the kernels of one device in a thread; wait() before the first call."""

    def __init__(self, device: torch.device, show: Show) -> None:
        self._device = device
        self._show = show
        self._compiled = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="sparge-warmup", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        started = time.perf_counter()
        try:
            kernels.warm(self._device, progress=self._progress)
        except BaseException as error:
            self._error = error
        if self._compiled:
            seconds = time.perf_counter() - started
            logger.info("[Sparge] compiled %d kernels in %.1f s", self._compiled, seconds)

    def _progress(self, done: int, total: int, name: str) -> None:
        self._compiled = done
        self._show(f"Compiling kernels for this GPU, once: {done} of {total} ({name})")

    def wait(self, check_cancelled: Callable[[], None]) -> str | None:
        """Blocks until done. Returns why the kernels cannot be used, or None when they can."""
        while self._thread.is_alive():
            check_cancelled()
            self._thread.join(_POLL_SECONDS)
        if isinstance(self._error, KernelBuildError):
            logger.error("[Sparge] a kernel did not compile:\n%s", self._error)
            return KERNEL_DID_NOT_COMPILE
        if self._error is not None:
            raise self._error
        return None


_warmups: dict[torch.device, Warmup] = {}
_lock = threading.Lock()


def warm_up(device: torch.device, show: Show) -> Warmup:
    """The warm-up of a device, started by whoever asks first in this process."""
    with _lock:
        if device not in _warmups:
            _warmups[device] = Warmup(device, show)
        return _warmups[device]

# SPDX-License-Identifier: Apache-2.0
"""Loader: makes a spec a kernel that can be launched, once per process and device."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice

import torch

from ..errors import KernelBuildError, Unsupported
from .cubin import Cubin
from .device import as_device, capabilities, compiler, cuda_index
from .driver import Kernel
from .folder import cache_folder
from .nvrtc import NvrtcNotFoundError
from .source import read_sources
from .spec import KernelSpec, native_specs
from .store import Store

Progress = Callable[[int, int, str], None]

#: NVRTC from which on threads compile side by side; earlier ones take a lock of their own.
_THREADS_FROM = (13, 0)

_kernels: dict[tuple[KernelSpec, int], Kernel] = {}
_locks: dict[tuple[KernelSpec, int], threading.Lock] = {}
_locks_guard = threading.Lock()


def get_kernel(spec: KernelSpec, device_index: int) -> Kernel:
    """The kernel on that GPU: from this process, the disk, or compiled now.

    Raises Unsupported for a GPU without usable kernels, KernelBuildError when it does not compile,
    DriverError when the driver refuses it.
    """
    key = (spec, device_index)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock(key):
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _load(spec, device_index)
    return kernel


def warm(
    device: torch.device | str | int,
    specs_of: Callable[[str], Sequence[KernelSpec]] = native_specs,
    progress: Progress | None = None,
) -> None:
    """Loads the kernels that a device needs of its target: by default all that a user's call can
    reach. Raises as ``get_kernel`` does."""
    capability = capabilities(device)
    if not capability.usable:
        raise Unsupported(capability.reason)
    index = cuda_index(as_device(device))
    load_all(specs_of(capability.arch), index, progress)


def load_all(wanted: Sequence[KernelSpec], index: int, progress: Progress | None = None) -> None:
    """Compiles what is missing on the GPU of this index, side by side, and loads it. progress: is
    called in this thread with (kernels ready, kernels in all, id of the last). Raises as
    ``get_kernel`` does."""
    if any((spec, index) not in _kernels for spec in wanted):
        _compile_in_processes(wanted)
    elif progress is None:
        return
    waiting, done = iter(wanted), 0
    workers = min(len(wanted), os.cpu_count() or 1) or 1
    with ThreadPoolExecutor(workers) as pool:
        # No more than run: Python ends when all that a pool was given is done.
        jobs = {pool.submit(get_kernel, spec, index): spec for spec in islice(waiting, workers)}
        try:
            while jobs:
                for job in wait(jobs, return_when=FIRST_COMPLETED).done:
                    job.result()
                    done += 1
                    if progress:
                        progress(done, len(wanted), jobs[job].id)
                    del jobs[job]
                    for spec in islice(waiting, 1):
                        jobs[pool.submit(get_kernel, spec, index)] = spec
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _compile_in_processes(specs: Sequence[KernelSpec]) -> None:
    """Compiles into the cache what is not there, side by side where threads cannot. What fails is
    compiled once more, and told of, where it is loaded."""
    from .build import build  # a program too, which Python warns of where it is imported before

    folder = cache_folder()
    with suppress(NvrtcNotFoundError, OSError, ImportError):
        nvrtc = compiler()
        if (
            nvrtc.version < _THREADS_FROM
            and folder
            and (os.cpu_count() or 1) > 1
            and sys.executable
        ):
            build(specs, nvrtc, folder)


def load_cubin(spec: KernelSpec) -> Cubin:
    """The cubin of ``spec`` from disk or compiled now; needs no GPU.

    Raises KernelBuildError.
    """
    try:
        nvrtc = compiler()
    except NvrtcNotFoundError as error:
        raise KernelBuildError(str(error)) from None
    return _store().get(spec, read_sources(spec.entry), nvrtc)


def _load(spec: KernelSpec, device_index: int) -> Kernel:
    capability = capabilities(device_index)
    if not capability.usable:
        raise Unsupported(capability.reason)
    return Kernel(load_cubin(spec).image, spec.entry, device_index)


@functools.cache
def _store() -> Store:
    return Store(cache_folder())


def _lock(key: tuple[KernelSpec, int]) -> threading.Lock:
    with _locks_guard:
        return _locks.setdefault(key, threading.Lock())

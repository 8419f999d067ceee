# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled in the background, and waited for when a run starts."""

from __future__ import annotations

import threading

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def warmup(load_pack, monkeypatch):
    module = load_pack("sparge.kernels.warmup")
    monkeypatch.setattr(module, "_warmups", {})
    monkeypatch.setattr(module, "eight_bit_specs", lambda arch, needs: [])
    return module


@pytest.fixture
def warm(warmup, monkeypatch):
    """Replaces the library's warm."""
    return lambda function: monkeypatch.setattr(warmup, "warm", function)


def never_cancelled():
    """Is called while waiting, and lets it go on."""


def test_it_works_in_the_background_once(warmup, warm):
    calls, finish = [], threading.Event()

    def slow(device, specs, progress):
        calls.append(device)
        assert finish.wait(10)

    warm(slow)
    first = warmup.warm_up(CPU, print)
    assert warmup.warm_up(CPU, print) is first
    finish.set()
    assert first.wait(never_cancelled) is None
    assert calls == [CPU]


def test_waiting_can_be_cancelled(warmup, warm):
    finish = threading.Event()
    warm(lambda *args: finish.wait(10))

    def cancel():
        raise InterruptedError

    try:
        with pytest.raises(InterruptedError):
            warmup.warm_up(CPU, print).wait(cancel)
    finally:
        finish.set()


@pytest.fixture
def tries(warmup, warm):
    """tries(error): how often kernels are compiled in three warm-ups of which the first one fails,
    the outcome of that, and of the last."""

    def of(error):
        errors, started, found = [error], [], []

        def once(*args):
            started.append(1)
            if errors:
                raise errors.pop()

        warm(once)
        warmup._warmups.clear()
        for _ in range(3):
            found.append(warmup.warm_up(CPU, print).wait(never_cancelled))
        return len(started), found[0], found[-1]

    return of


def test_only_what_may_go_better_is_tried_again(load_pack, warmup, warm, tries):
    sparge = load_pack("sparge")
    full = sparge.kernels.DriverError("cuModuleLoadData", "CUDA_ERROR_OUT_OF_MEMORY", "full")
    refused, failed = warmup.KERNEL_DID_NOT_COMPILE, sparge.KernelBuildError
    assert tries(full) == (2, warmup.KERNEL_DID_NOT_LOAD, None)
    assert tries(OSError("disk full")) == (2, warmup.NO_KERNELS, None)
    assert tries(failed("no compiler")) == (2, refused, None)
    assert tries(failed("attend", "line 1")) == (1, refused, refused)
    assert tries(sparge.Unsupported("too old")) == (1, "too old", "too old")
    assert tries(RuntimeError("a bug")) == (2, warmup.NO_KERNELS, None)
    with pytest.raises(KeyboardInterrupt):
        tries(KeyboardInterrupt())

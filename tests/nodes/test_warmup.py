# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled in the background, and waited for when a run starts. Where the compiler of
an H200 refuses Hopper's own, others run, and the report says so."""

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
    full = sparge.kernels.DriverError("cuModuleLoadData", 2, "CUDA_ERROR_OUT_OF_MEMORY", "full")
    refused, failed = warmup.KERNEL_DID_NOT_COMPILE, sparge.KernelBuildError
    assert tries(full) == (2, warmup.KERNEL_DID_NOT_LOAD, None)
    assert tries(OSError("disk full")) == (2, warmup.NO_KERNELS, None)
    assert tries(failed("no compiler")) == (2, refused, None)
    assert tries(failed("attend", "line 1")) == (1, refused, refused)
    assert tries(sparge.Unsupported("too old")) == (1, "too old", "too old")
    assert tries(RuntimeError("a bug")) == (2, warmup.NO_KERNELS, None)
    with pytest.raises(KeyboardInterrupt):
        tries(KeyboardInterrupt())


GPU, H200 = torch.device("cuda", 0), "NVIDIA H200"
NOTE = "The kernels for sm_90a did not compile (see the log), so slower ones for sm_90 run."


def test_where_hoppers_own_do_not_compile_the_next_targets_run_and_the_report_says_so_once(
    load_pack, monkeypatch, caplog, reference_allowed, sampled, step
):
    sparge, device = load_pack("sparge"), load_pack("sparge.kernels.device")
    loader, warmup = load_pack("sparge.kernels.loader"), load_pack("sparge.kernels.warmup")
    loaded: list[str] = []

    def load(spec, index):
        if spec.entry == "attend_hopper":
            raise sparge.KernelBuildError(f"Kernel {spec.id} does not compile.", "no wgmma")
        loaded.append(spec.id)
        return object()

    monkeypatch.setattr(loader, "_load", load)
    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(warmup, "_warmups", {})
    for name, empty in (("_known", {}), ("_refused", set()), ("_in_use", set())):
        monkeypatch.setattr(device, name, empty)
    monkeypatch.setattr(device, "_ask_cuda", lambda index: device.arch_for((9, 0), H200))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H200)
    with caplog.at_level("INFO", logger="sparge"):
        assert warmup.warm_up(GPU, print).wait(never_cancelled) is None
    known = sparge.capabilities(GPU)
    assert (known.arch, known.note) == ("sm_90", NOTE)
    wanted = {spec.id for spec in warmup.eight_bit_specs("sm_90")}
    attend = {f"attend-sm_90-d{size}-int8_fp16" for size in (64, 128)}
    assert attend < wanted <= set(loaded)
    passed_over, path = caplog.messages
    assert "no wgmma" in passed_over and "attend_hopper-sm_90a" in passed_over
    assert path == "[Sparge] attention on cuda:0 by kernels for sm_90"
    monkeypatch.setattr(load_pack("sparge.session.session"), "capabilities", lambda device: known)
    monkeypatch.setattr(load_pack("sparge.session").Session, "await_kernels", lambda *_: None)
    got = sampled(step, [0.9, 0.7, 0.6])
    assert got.notes.count(NOTE) == got.line.count(NOTE.rstrip(".")) == 1

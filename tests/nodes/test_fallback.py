# SPDX-License-Identifier: Apache-2.0
"""An H200 whose compiler refuses Hopper's own kernels: the node runs others, and says so."""

from __future__ import annotations

import pytest
import torch

GPU, H200 = torch.device("cuda", 0), "NVIDIA H200"
NOTE = "The kernels for sm_90a did not compile (see the log), so slower ones for sm_90 run."


@pytest.fixture
def refusing(load_pack, monkeypatch):
    """refusing(*entries): the compiler refuses these. Has the ids of kernels that were loaded."""
    sparge, device = load_pack("sparge"), load_pack("sparge.kernels.device")
    loader, warmup = load_pack("sparge.kernels.loader"), load_pack("sparge.kernels.warmup")
    loaded: list[str] = []

    def refuse(*entries):
        def load(spec, index):
            if spec.entry in entries:
                raise sparge.KernelBuildError(f"Kernel {spec.id} does not compile.", "no wgmma")
            loaded.append(spec.id)
            return object()

        monkeypatch.setattr(loader, "_load", load)
        return loaded

    monkeypatch.setattr(device, "_known", {})
    monkeypatch.setattr(device, "_refused", set())
    monkeypatch.setattr(device, "_in_use", set())
    monkeypatch.setattr(device, "_ask_cuda", lambda index: device.arch_for((9, 0), H200))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H200)
    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(warmup, "_warmups", {})
    return refuse


@pytest.fixture
def warmed(load_pack):
    """Reason why the kernels cannot be used, once the warm-up is over."""
    return lambda: load_pack("sparge.kernels.warmup").warm_up(GPU, print).wait(lambda: None)


def test_the_next_targets_kernels_run(load_pack, refusing, warmed, caplog):
    loaded = refusing("attend_hopper")
    with caplog.at_level("INFO", logger="sparge"):
        assert warmed() is None
    capability = load_pack("sparge").capabilities(GPU)
    assert (capability.arch, capability.note) == ("sm_90", NOTE)
    wanted = {spec.id for spec in load_pack("sparge.kernels.warmup").eight_bit_specs("sm_90")}
    attend = {f"attend-sm_90-d{size}-int8_fp16" for size in (64, 128)}
    assert attend < wanted <= set(loaded)
    passed_over, path = caplog.messages
    assert "no wgmma" in passed_over and "attend_hopper-sm_90a" in passed_over
    assert path == ("[Sparge] attention on cuda:0 by kernels for sm_90")


def test_the_report_says_so_once(
    load_pack, refusing, warmed, monkeypatch, reference_allowed, sampled, step
):
    refusing("attend_hopper")
    warmed()
    known = load_pack("sparge").capabilities(GPU)
    monkeypatch.setattr(load_pack("sparge.session.session"), "capabilities", lambda device: known)
    monkeypatch.setattr(load_pack("sparge.session").Session, "await_kernels", lambda *_: None)
    got = sampled(step, [0.9, 0.7, 0.6])
    assert got.notes.count(NOTE) == got.line.count(NOTE.rstrip(".")) == 1

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparge.errors import Unsupported
from sparge.kernels import KernelSpec, capabilities, device, driver, get_kernel, warm
from sparge.kernels.device import SERVED_BY, Capability, arch_for
from sparge.kernels.nvrtc import NvrtcNotFoundError


def _nvrtc(monkeypatch, version, archs=(80, 86, 89, 90, 100, 103, 120, 121)):
    fake = SimpleNamespace(version=version, archs=frozenset(archs))
    monkeypatch.setattr(device, "compiler", lambda: fake)


@pytest.fixture
def gpu(monkeypatch, fresh_targets):
    """A machine whose torch has one GPU: gpu((8, 9)) plants it."""

    def plant(capability, cuda="13.0", hip=None, count=1):
        fresh_targets()
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(driver, "library", lambda: None)
        _nvrtc(monkeypatch, (13, 0))
        for name, answer in (
            ("is_available", count > 0),
            ("device_count", count),
            ("current_device", 0),
            ("get_device_name", "GPU X"),
            ("get_device_capability", capability),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)

    return plant


def _refused(capability: Capability, words: str) -> None:
    assert not capability.usable and capability.arch == ""
    assert words in capability.reason
    assert capability.reason.endswith(".") and "\n" not in capability.reason


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("cpu", "The CPU"), (torch.device("mps"), "Apple's GPU (MPS)"),
        ("xpu:0", "Intel's GPU (XPU)"), ("privateuseone", "'privateuseone'"),
    ],
)  # fmt: skip
def test_other_devices(where, words):
    _refused(capabilities(where), words)
    assert "toaster" in capabilities("toaster").reason


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ({"capability": (7, 5)}, "too old"),
        ({"capability": (13, 0)}, "not supported yet"),
        ({"cuda": None, "hip": "6.4"}, "AMD"),
        ({"cuda": None}, "built without CUDA"),
        ({"count": 0}, "finds no GPU"),
    ],
    ids=str,
)
def test_gpus_that_are_refused(gpu, planted, words):
    gpu((9, 0), count=2)
    assert capabilities(1).usable
    _refused(capabilities("cuda:2"), "no GPU 2: this machine has 2")
    gpu(**{"capability": (9, 0), **planted})
    _refused(capabilities("cuda:0"), words)
    with pytest.raises(Unsupported, match=words):
        get_kernel(KernelSpec("means", "sm_80"), 0)
    with pytest.raises(Unsupported, match=words):
        warm("cuda:0")


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (driver, "library", driver.DriverNotFoundError("libcuda.so.1 is not installed")),
        (device, "compiler", NvrtcNotFoundError("NVRTC was not found.")),
        (torch.cuda, "get_device_capability", RuntimeError("driver shut down")),
    ],
    ids=["driver", "NVRTC", "anything"],
)
def test_what_fails_is_a_reason_and_never_raised(gpu, monkeypatch, owner, name, error, raising):
    gpu((9, 0))
    monkeypatch.setattr(owner, name, raising(error))
    found = capabilities("cuda:0")
    assert not found.usable and str(error).rstrip(".") in found.reason


@pytest.mark.parametrize(("capability", "target"), SERVED_BY.items(), ids=str)
def test_each_gpu_has_its_target(gpu, monkeypatch, capability, target):
    gpu(capability, count=2)
    for where in (0, 1, "cuda", "cuda:0", torch.device("cuda", 0)):
        assert capabilities(where) == Capability(True, arch=target)
    before = capabilities(0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    assert capabilities("cuda:0") is before, "it is asked once"


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [
        ((12, 0), (12, 6), ""), ((12, 0), (12, 8), "sm_120a"), ((12, 1), (12, 8), ""),
        ((12, 1), (12, 9), "sm_121a"), ((8, 9), (12, 1), ""), ((8, 9), (12, 4), "sm_89"),
    ],
)  # fmt: skip
def test_an_older_nvrtc_builds_what_it_can(monkeypatch, capability, version, expected):
    _nvrtc(monkeypatch, version)
    found = arch_for(capability, "GPU X")
    assert found.arch == expected
    if not expected:
        _refused(found, "update PyTorch")
        assert "{}.{}".format(*version) in found.reason
    _nvrtc(monkeypatch, (14, 0), archs=(80, 90))
    _refused(arch_for((8, 6), "RTX 3090"), "update PyTorch")  # it has dropped the target

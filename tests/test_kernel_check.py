# SPDX-License-Identifier: Apache-2.0
"""A call falls back to the next target before it launches anything; on a pretended H200."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparge
from sparge import KernelBuildError, Precision, SparsePolicy
from sparge.kernels import Element, KernelSpec, device, loader
from sparge.kernels.spec import HOPPER_ATTEND, HOPPER_ATTEND_16, HOPPER_ENTRIES
from sparge.stages import pipeline
from sparge.stages.workspace import CallShape

FP16, E4M3 = int(Element.INT8_FP16), int(Element.INT8_E4M3)


class Gpu:
    """Notes (entry, target) that is loaded and (op, element) that is launched, in order; has every
    kernel but the ``missing`` (entry, target)."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, str]] = []
        self.launched: list[tuple[str, int]] = []
        self.loads_at_launch: list[int] = []
        self.missing: set[tuple[str, str]] = set()

    def load(self, spec: KernelSpec, index: int) -> object:
        kernel = (spec.entry, spec.arch)
        self.loaded.append(kernel)
        if kernel in self.missing:
            raise KernelBuildError(f"Kernel {spec.id} does not compile.", "not today")
        return object()

    def launch(self, op: str, element: Any) -> None:
        self.launched.append((op, int(element)))
        self.loads_at_launch.append(len(self.loaded))

    def ops(self) -> SimpleNamespace:
        def quantize(q: Any, k: Any, v: Any, lengths: Any, element: int, *_: Any):
            self.launch("quantize", element)
            return torch.empty(0)

        def route(workspace: Any, sizes: list[int], element: int, *_: Any):
            self.launch("route", element)
            return torch.empty(CallShape(*sizes).map_shape).int()

        def attend(q: Any, workspace: Any, block_map: Any, sizes: Any, element: int, *_: Any):
            self.launch("attend", element)

        return SimpleNamespace(quantize=quantize, route=route, attend=attend)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, fresh_targets) -> Gpu:
    gpu = Gpu()
    fresh_targets()
    monkeypatch.setattr(pipeline, "_built", set())
    monkeypatch.setattr(device, "_ask_cuda", lambda _: device.arch_for((9, 0), "NVIDIA H200"))
    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(loader, "_load", gpu.load)
    monkeypatch.setattr(pipeline, "ops", gpu.ops())
    for module in (pipeline, importlib.import_module("sparge.call"), loader, device):
        monkeypatch.setattr(module, "capabilities", lambda _: device._learn(0))
    return gpu


@pytest.mark.parametrize("missing", [None, HOPPER_ATTEND, "quantize"])
def test_a_call_falls_back_before_it_launches_and_once(gpu, make_qkv, monkeypatch, caplog, missing):
    gpu.missing = {(missing or "", "sm_90a")}
    sparge.attention(*make_qkv())
    fallback, own = ("sm_90", FP16, "attend"), ("sm_90a", E4M3, HOPPER_ATTEND)
    target, element, attend = fallback if missing else own
    assert gpu.launched == [(op, element) for op in ("quantize", "route", "attend")]
    assert set(gpu.loads_at_launch) == {len(gpu.loaded)}, "all loads come before all launches"
    on_target = sorted(entry for entry, arch in gpu.loaded if arch == target)
    assert on_target == sorted([attend, "means", "quantize", "route"])
    assert len(caplog.records) == bool(missing) and ("not today" in caplog.text) == bool(missing)
    loads = len(gpu.loaded)
    monkeypatch.setattr(pipeline, "warm", None)  # what was built is looked up
    sparge.attention(*make_qkv(heads=3, tokens=300))
    assert len(gpu.loaded) == loads and {element for _, element in gpu.launched} == {element}
    if not missing:
        with pytest.raises(TypeError, match="not callable"):
            sparge.attention(*make_qkv(head_dim=128))


def test_only_kernels_of_the_call_are_asked_for_and_a_target_in_use_stays(gpu, make_qkv) -> None:
    """A call that began on it could not end on another: operand types and layouts differ."""
    gpu.missing = {(HOPPER_ATTEND_16, "sm_90a")}
    sixteen_bit, (q, k, v) = SparsePolicy(precision=Precision.SIXTEEN_BIT), make_qkv()
    sparge.attention(q, k, v)
    assert device._learn(0).arch == "sm_90a"
    gpu.launched.clear()
    with pytest.raises(KernelBuildError, match=HOPPER_ATTEND_16):
        sparge.attention(q, k, v, policy=sixteen_bit)
    assert device._learn(0).arch == "sm_90a" and not gpu.launched


def test_where_no_target_compiles_the_compiler_is_heard(gpu: Gpu, make_qkv) -> None:
    gpu.missing = {("attend", "sm_90"), *((entry, "sm_90a") for entry in HOPPER_ENTRIES)}
    with pytest.raises(KernelBuildError, match="attend-sm_90-d64-int8_fp16") as caught:
        sparge.attention(*make_qkv())
    assert caught.value.log == "not today" and not gpu.launched
    assert device._learn(0).usable and device._learn(0).arch == "sm_90"

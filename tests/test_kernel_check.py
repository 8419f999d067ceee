# SPDX-License-Identifier: Apache-2.0
"""A call falls back to the next target before it launches anything; on a pretended H200."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparge
from sparge import KernelBuildError, Precision, SparsePolicy
from sparge.kernels import Element, device
from sparge.kernels.spec import HOPPER_ATTEND, HOPPER_ATTEND_16, HOPPER_ENTRIES
from tests.pretended_gpu import PretendedGpu


@pytest.fixture
def gpu(pretend_gpu: Callable[..., PretendedGpu]) -> PretendedGpu:
    return pretend_gpu(None)


def entries(gpu: PretendedGpu) -> list[tuple[str, str]]:
    return [(each.spec.entry, each.spec.arch) for each in gpu.launched]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("missing", [None, HOPPER_ATTEND, "quantize"])
def test_a_call_falls_back_before_it_launches_and_once(
    gpu, make_qkv, caplog, missing: str | None, compiled: bool
) -> None:
    torch._dynamo.reset()
    gpu.missing = {(missing or "", "sm_90a")}
    attention: Any = sparge.attention
    if compiled:
        attention = torch.compile(attention, fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a cache in what is traced, say
        attention(*make_qkv())
    fallback = ("sm_90", Element.INT8_FP16, "attend")
    own = ("sm_90a", Element.INT8_E4M3, HOPPER_ATTEND)
    target, element, attend = fallback if missing else own
    needed = ["means", "quantize", "route", attend]
    assert entries(gpu) == [(entry, target) for entry in needed]
    assert gpu.launched[-1].spec.element is element
    assert set(gpu.loads_at_launch) == {len(gpu.loaded)}, "all loads come before all launches"
    assert sorted(x.entry for x in gpu.loaded if x.arch == target) == sorted(needed)
    said = [record.getMessage() for record in caplog.records if record.name == "sparge"]
    assert len(said) == bool(missing) and all("not today" in each for each in said)
    loads = len(gpu.loaded)
    attention(*make_qkv(heads=3, tokens=300))
    assert len(gpu.loaded) == loads and {x.spec.arch for x in gpu.launched} == {target}


def test_only_kernels_of_the_call_are_asked_for_and_a_target_in_use_stays(gpu, make_qkv) -> None:
    """A call that began on it could not end on another: operand types and layouts differ."""
    gpu.missing = {(HOPPER_ATTEND_16, "sm_90a")}
    sixteen_bit, (q, k, v) = SparsePolicy(precision=Precision.SIXTEEN_BIT), make_qkv()
    sparge.attention(q, k, v)
    assert device.capabilities(0).arch == "sm_90a"
    gpu.launched.clear()
    with pytest.raises(KernelBuildError, match=HOPPER_ATTEND_16):
        sparge.attention(q, k, v, policy=sixteen_bit)
    assert device.capabilities(0).arch == "sm_90a" and not gpu.launched


def test_where_no_target_compiles_the_compiler_is_heard(gpu: PretendedGpu, make_qkv) -> None:
    gpu.missing = {("attend", "sm_90"), *((entry, "sm_90a") for entry in HOPPER_ENTRIES)}
    with pytest.raises(KernelBuildError, match="attend-sm_90-d64-int8_fp16") as caught:
        sparge.attention(*make_qkv())
    assert caught.value.log == "not today" and not gpu.launched
    assert device.capabilities(0).usable and device.capabilities(0).arch == "sm_90"

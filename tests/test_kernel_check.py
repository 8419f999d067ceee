# SPDX-License-Identifier: Apache-2.0
"""A call has all of its kernels before it launches any; on a pretended H200."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparge
from sparge import KernelBuildError, Precision, SparsePolicy
from sparge.kernels.spec import HOPPER_ATTEND, HOPPER_ATTEND_16
from tests.pretended_gpu import PretendedGpu


@pytest.fixture
def gpu(pretend_gpu: Callable[..., PretendedGpu]) -> PretendedGpu:
    return pretend_gpu(None)


@pytest.mark.parametrize("compiled", [False, True])
def test_all_loads_come_before_all_launches_and_once(gpu, make_qkv, compiled: bool) -> None:
    torch._dynamo.reset()
    attention: Any = sparge.attention
    if compiled:
        attention = torch.compile(attention, fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a cache in what is traced, say
        attention(*make_qkv())
    needed = ["means", "quantize", "route", HOPPER_ATTEND]
    assert [each.spec.entry for each in gpu.launched] == needed
    assert sorted(spec.entry for spec in gpu.loaded) == sorted(needed)
    assert {spec.arch for spec in gpu.loaded} == {"sm_90a"}
    assert set(gpu.loads_at_launch) == {len(gpu.loaded)}
    attention(*make_qkv(heads=3, tokens=300))
    assert len(gpu.loaded) == len(needed)


def test_a_kernel_that_does_not_compile_is_heard_where_a_call_needs_it(gpu, make_qkv) -> None:
    gpu.missing = {(HOPPER_ATTEND_16, "sm_90a")}
    sixteen_bit, (q, k, v) = SparsePolicy(precision=Precision.SIXTEEN_BIT), make_qkv()
    sparge.attention(q, k, v)
    gpu.launched.clear()
    with pytest.raises(KernelBuildError, match=HOPPER_ATTEND_16) as caught:
        sparge.attention(q, k, v, policy=sixteen_bit)
    assert caught.value.log == "not today" and not gpu.launched

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from sparge import Precision, reference
from sparge.kernels import Element
from sparge.policy import operand_dtype
from tests.fuzz import rounding
from tests.oracle import (
    HOPPER_SOFTMAX,
    HOPPER_SOFTMAX_16,
    PORTABLE_SOFTMAX,
    attend,
    quantize_qkv,
)

HOPPER = (9, 0)
HOPPERS_SOFTMAX = {
    Element.INT8_E4M3: HOPPER_SOFTMAX,
    Element.INT8_FP16: PORTABLE_SOFTMAX,
    Element.BF16: HOPPER_SOFTMAX_16,
    Element.FP16: HOPPER_SOFTMAX_16,
}


@pytest.fixture(params=["cpu", "cpu as a Hopper GPU", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> str:
    """Device that a test runs on: kernels on a GPU, on the CPU the reference, or the emulation of a
    Hopper GPU's kernels in its place."""
    if request.param in ("cpu", "cuda"):
        return request.param
    pipeline, attention = importlib.import_module("sparge.reference.pipeline"), reference.attention

    def emulated(*given: Any, **named: Any) -> Any:
        element = _element_on_hopper(given[3].precision, *(x.dtype for x in given[:3]))
        operands = SimpleNamespace(of=partial(quantize_qkv, element=element))
        stage = partial(attend, softmax=HOPPERS_SOFTMAX[element])
        with mock.patch.multiple(pipeline, Operands=operands, attend=stage):
            return attention(*given, **named)

    monkeypatch.setattr(reference, "attention", emulated)
    monkeypatch.setattr(rounding, "CPU_IS_LIKE", HOPPER)
    return "cpu"


def _element_on_hopper(precision: Precision, *dtypes: torch.dtype) -> Element:
    if precision is not Precision.SIXTEEN_BIT:
        return Element.INT8_E4M3 if precision is Precision.INT8 else Element.INT8_FP16
    return Element.FP16 if operand_dtype(*dtypes) == torch.float16 else Element.BF16

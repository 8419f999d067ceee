# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
from typing import Any

import pytest

from sparge import Precision
from sparge.kernels import Element
from sparge.reference.arithmetic import HOPPER_SOFTMAX, HOPPER_SOFTMAX_16, PORTABLE_SOFTMAX
from tests.fuzz import rounding

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
    """Device that a test runs on: kernels on a GPU, on the CPU the reference, whose arithmetic is
    that of the portable kernels or of a Hopper GPU's."""
    if request.param in ("cpu", "cuda"):
        return request.param
    pipeline = importlib.import_module("sparge.reference.pipeline")
    quantize, attend = pipeline._quantize, pipeline.attend

    def quantize_e4m3(q: Any, k: Any, v: Any, policy: Any, order: Any, lengths: Any, _: Any) -> Any:
        element = Element.INT8_E4M3 if policy.precision is Precision.INT8 else None
        return quantize(q, k, v, policy, order, lengths, element)

    def attend_in_steps(x: Any, *given: Any, **named: Any) -> Any:
        return attend(x, *given, softmax=HOPPERS_SOFTMAX[x.element], **named)

    monkeypatch.setattr(pipeline, "_quantize", quantize_e4m3)
    monkeypatch.setattr(pipeline, "attend", attend_in_steps)
    monkeypatch.setattr(rounding, "CPU_IS_LIKE", HOPPER)
    return "cpu"

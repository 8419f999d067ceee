# SPDX-License-Identifier: Apache-2.0
"""A kernel that cannot be had costs nobody the model: calls stay exact, are counted, and the log
says it once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.nn import functional

import sparge
from sparge import torch_attention
from sparge.kernels import DriverError
from sparge.kernels.warmup import KERNEL_DID_NOT_COMPILE, KERNEL_DID_NOT_LOAD
from sparge.reasons import Reason
from sparge.stages import on_reference

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

POLICY, TOKENS = sparge.SparsePolicy(topk=0.3, attention_sink=True), 320
ERRORS = {
    KERNEL_DID_NOT_COMPILE: sparge.KernelBuildError("attend does not compile", "nvrtc: unknown"),
    KERNEL_DID_NOT_LOAD: DriverError("cuModuleLoadData", "CUDA_ERROR_NO_BINARY", "no binary"),
}


@pytest.fixture(params=ERRORS)
def reason(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reason:
    """Reason of calls whose kernels cannot be had."""

    def run(*_: Any, **__: Any) -> None:
        raise ERRORS[request.param]

    monkeypatch.setattr(on_reference, "attend", run)
    monkeypatch.setattr(torch_attention, "_given_up", {})
    return request.param


def test_calls_stay_exact_are_counted_and_the_log_says_it_once(
    reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    q = torch.ones(1, 2, TOKENS, 64).tril()
    exact = functional.scaled_dot_product_attention(q, q, q)
    with caplog.at_level(logging.ERROR, "sparge"), sparge.sdpa(POLICY, 128) as stats:
        for _ in range(3):
            assert torch.equal(functional.scaled_dot_product_attention(q, q, q), exact)
    assert stats.reasons == {reason: 3} and len(caplog.records) == 1
    assert str(ERRORS[reason]) in caplog.text


def test_a_pipeline_of_diffusers_stays_exact(reason: str, caplog) -> None:
    pytest.importorskip("diffusers")
    from sparge.integrations.diffusers import enable
    from tests.tiny_models.pipelines import ALL

    tiny = ALL["Wan 2.1"]()
    own = tiny(2)
    with enable(tiny.pipe, "manual", topk=0.3, min_tokens=100, start_percent=0.0) as handle:
        assert torch.equal(tiny(2), own)
    assert handle.stats is not None and handle.stats.counts.sparse == 0
    assert handle.stats.counts.dense == 8
    if reason == KERNEL_DID_NOT_COMPILE:
        assert handle.stats.counts.reasons == {reason: 8} and len(caplog.records) == 1

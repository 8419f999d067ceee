# SPDX-License-Identifier: Apache-2.0
"""pvthreshd is used where it saves time, and left out where it does not."""

from __future__ import annotations

import pytest
import torch

from tests.nodes.parts import TOKENS

CPU = torch.device("cpu")


@pytest.fixture
def settings(load_pack):
    return load_pack("sparge.session.settings")


@pytest.fixture
def on_gpu(load_pack, settings, monkeypatch):
    """on_gpu(arch): the filter is chosen as on such a GPU."""
    capability = load_pack("sparge.kernels").Capability
    return lambda arch: monkeypatch.setattr(
        settings, "capabilities", lambda device: capability(True, "", arch)
    )


@pytest.mark.parametrize(("arch", "threshold"), [("", 15.0), ("sm_89", 15.0), ("sm_90a", 50.0)])
def test_it_goes_where_it_saves_nothing(settings, on_gpu, arch, threshold):
    policy = settings.Settings(pvthreshd=15.0, topk=0.3).policy()
    if arch:
        on_gpu(arch)
    fitted = settings.fitted(policy, CPU)
    assert (fitted.pvthreshd, fitted.topk) == (threshold, 0.3)
    assert (fitted is policy) == (threshold == 15)


@pytest.fixture
def told(reference_allowed, sampled, step, asked):
    """told(**widgets): thresholds that calls of a run had, and whether it tells of a filter that it
    left out."""

    def run(**widgets):
        got = sampled(step, [0.9, 0.7, 0.6], **widgets)
        return {call.policy.pvthreshd for call in asked}, got.counts.filter_left_out

    return run


@pytest.mark.parametrize("mode", ["manual", "auto quality", "auto budget"])
@pytest.mark.parametrize(
    ("arch", "wanted", "given", "left_out"),
    [("sm_89", 15.0, 15.0, False), ("sm_90a", 15.0, 50.0, True), ("sm_90a", 50.0, 50.0, False)],
)
def test_a_run_tells_what_it_left_out(told, on_gpu, mode, arch, wanted, given, left_out):
    on_gpu(arch)
    assert told(mode=mode, pvthreshd=wanted) == ({given}, left_out)


def test_nothing_is_left_out_where_nothing_was_sparse(load_pack, told, on_gpu, monkeypatch):
    def refuse(*args, **kwargs):
        raise load_pack("sparge").Unsupported("no")

    on_gpu("sm_90a")
    assert told(min_tokens=TOKENS + 1) == (set(), False)
    monkeypatch.setattr(load_pack("sparge.session.calls"), "attention", refuse)
    assert told() == (set(), False)

# SPDX-License-Identifier: Apache-2.0
"""pvthreshd is used where it saves time, and left out where it does not."""

from __future__ import annotations

import pytest


@pytest.fixture
def settings(load_pack):
    return load_pack("sparge.session.schedule")


@pytest.fixture
def on_gpu(load_pack, settings, monkeypatch):
    """on_gpu(arch): the filter is chosen as on such a GPU."""
    capability = load_pack("sparge.kernels").Capability
    return lambda arch: monkeypatch.setattr(
        settings, "capabilities", lambda device: capability(True, "", arch)
    )


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

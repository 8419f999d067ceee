# SPDX-License-Identifier: Apache-2.0
"""pvthreshd is used where it saves time, and left out where it does not."""

from __future__ import annotations

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def pv_filter(load_pack):
    return load_pack("nodes.pv_filter")


@pytest.fixture
def policy(load_pack):
    return load_pack("nodes.settings").Settings(pvthreshd=15.0).policy(0, 256)


def test_it_stays_where_nothing_is_known(pv_filter, policy):
    assert pv_filter.fitted(policy, CPU) is policy


@pytest.mark.parametrize(("saves", "threshold"), [(True, 15.0), (False, 50.0)])
def test_it_goes_where_it_saves_nothing(pv_filter, policy, monkeypatch, saves, threshold):
    monkeypatch.setattr(pv_filter, "pv_filter_saves", lambda device: saves)
    fitted = pv_filter.fitted(policy, CPU)
    assert fitted.pvthreshd == threshold
    assert (fitted.topk, fitted.exact_suffix) == (policy.topk, 256)


@pytest.mark.parametrize(("arch", "filtered"), [("sm_89", True), ("sm_90a", False)])
def test_only_what_can_run_is_compiled(load_pack, arch, filtered):
    specs = load_pack("nodes.warmup").node_specs(arch)
    assert any(spec.pv_filter for spec in specs) == filtered
    assert any(spec.entry.startswith("attend") and not spec.pv_filter for spec in specs)

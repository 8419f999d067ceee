# SPDX-License-Identifier: Apache-2.0
"""pvthreshd is used where it saves time, and left out where it does not."""

from __future__ import annotations

import pytest
import torch

CPU = torch.device("cpu")
TOKENS, HEADS = 256, 2


@pytest.fixture
def pv_filter(load_pack):
    return load_pack("sparge.tune.ways")


@pytest.fixture
def on_gpu(load_pack, pv_filter, monkeypatch):
    """on_gpu(arch): the filter is chosen as on such a GPU."""
    capability = load_pack("sparge.kernels").Capability
    return lambda arch: monkeypatch.setattr(
        pv_filter, "capabilities", lambda device: capability(True, "", arch)
    )


@pytest.fixture
def policy(load_pack):
    return load_pack("nodes.settings").Settings(pvthreshd=15.0, topk=0.3).policy()


def test_it_stays_where_nothing_is_known(pv_filter, policy):
    assert pv_filter.fitted(policy, CPU) is policy


@pytest.mark.parametrize(("arch", "threshold"), [("sm_89", 15.0), ("sm_90a", 50.0)])
def test_it_goes_where_it_saves_nothing(pv_filter, policy, on_gpu, arch, threshold):
    on_gpu(arch)
    fitted = pv_filter.fitted(policy, CPU)
    assert (fitted.pvthreshd, fitted.topk) == (threshold, 0.3)


@pytest.mark.parametrize(("arch", "filtered"), [("sm_89", True), ("sm_90a", False)])
def test_only_what_can_run_is_compiled(load_pack, arch, filtered):
    specs = load_pack("sparge.kernels.warmup").eight_bit_specs(arch)
    assert any(spec.pv_filter for spec in specs) == filtered
    assert any(spec.entry.startswith("attend") and not spec.pv_filter for spec in specs)


@pytest.fixture
def told(load_pack, monkeypatch, reference_allowed, patcher, session, generator, runs):
    """told(**widgets): thresholds that calls of a run had, and whether it tells of a filter that it
    left out."""
    module = load_pack("sparge.tune.call")
    node = load_pack("nodes.sparge_attention").SpargeAttention
    q = torch.randn(1, TOKENS, HEADS * 64, generator=generator)
    library = module.attention
    thresholds = []

    def spy(q, k, v, policy, **kwargs):
        thresholds.append(policy.pvthreshd)
        return library(q, k, v, policy, **kwargs)

    monkeypatch.setattr(module, "attention", spy)

    def run(**widgets):
        patched = node.execute(patcher, **({"min_tokens": TOKENS} | widgets))[0]
        session(patched).sample(lambda attend: attend(q, q, q, HEADS), [0.9, 0.7, 0.6])
        return set(thresholds), runs[-1][0].tally.filter_left_out

    return run


@pytest.mark.parametrize("mode", ["manual", "auto quality", "auto budget"])
@pytest.mark.parametrize(
    ("arch", "asked", "given", "left_out"),
    [
        ("sm_89", 15.0, 15.0, False),
        ("sm_90a", 15.0, 50.0, True),
        ("sm_90a", 50.0, 50.0, False),
    ],
)
def test_a_run_tells_what_it_left_out(told, on_gpu, mode, arch, asked, given, left_out):
    on_gpu(arch)
    assert told(mode=mode, pvthreshd=asked) == ({given}, left_out)


def test_a_dense_run_left_nothing_out(told, on_gpu):
    on_gpu("sm_90a")
    assert told(min_tokens=TOKENS + 1) == (set(), False)


def test_a_refused_call_left_nothing_out(load_pack, told, on_gpu, monkeypatch):
    def refuse(*args, **kwargs):
        raise load_pack("sparge").Unsupported("no")

    on_gpu("sm_90a")
    monkeypatch.setattr(load_pack("sparge.tune.call"), "attention", refuse)
    assert told() == (set(), False)

# SPDX-License-Identifier: Apache-2.0
"""Dense calls of the auto modes are in 8 bits where the speed table says that this is faster."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.nodes.parts import BLOCKS, HEADS

TOKENS = 512
PAIRS = HEADS * TOKENS**2
FLAGS = {"skip_reshape": True}


@pytest.fixture
def table(load_pack, monkeypatch):
    """table(exact seconds): makes this the speed table of calls that keep every pair; 8-bit dense
    ones take a second, and the host some to queue them, and measurements no time. Gives the names
    of the backends asked for."""
    speed, state, backends = load_pack("sparge.speed"), load_pack("sparge.session.session"), []
    monkeypatch.delenv("SPARGE_REFERENCE", raising=False)
    monkeypatch.setattr(load_pack("sparge.tune.ways"), "FEWEST_TOKENS", 1)
    monkeypatch.setattr(state, "unusable_reason", lambda device: None)

    def pretend(exact, sparse=0.1, host=0.0):
        ways = (exact, 0.0), (1.0, host), (sparse, 0.0)
        cost = [speed.Cost(of_host, 0, 0, seconds / PAIRS) for seconds, of_host in ways]
        found = speed.SpeedTable({}, "", {64: speed.Times(*cost, margin=0.0)})

        def known(device, backend):
            backends.append(backend.name)
            return found

        monkeypatch.setattr(state, "known_table", known)
        return backends

    return pretend


@pytest.fixture
def qkv(generator):
    return torch.randn(3, 1, HEADS, TOKENS, 64, generator=generator, dtype=torch.bfloat16)


@pytest.fixture
def run(sampled, qkv):
    """run(call, sigmas, **widgets): a run of two blocks and three steps, the first one dense. Its
    given: what the calls gave, in their order."""

    def of(call=lambda attend, qkv: attend(*qkv, HEADS, **FLAGS), sigmas=(0.9, 0.7, 0.5), **given):
        got = sampled(
            lambda attend: [call(attend, qkv) for _ in range(BLOCKS)], sigmas, latent=(8, 16, 16),
            **{"mode": "auto budget", "topk": 0.5, "min_tokens": TOKENS} | given,
        )  # fmt: skip
        got.given = [out for of_pass in got.given for out in of_pass]
        return got

    return of


@pytest.mark.parametrize("mode", ["auto budget", "auto quality"])
def test_the_dense_steps_are_in_eight_bits_and_measured(table, run, load_pack, qkv, mode):
    backends = table(2.0)
    got, exact = run(mode=mode), run(mode=mode, exact_dense=True)
    for each, eight_bit in ((got, BLOCKS), (exact, 0)):
        counts = each.counts
        assert (counts.eight_bit, counts.dense, counts.sparse) == (eight_bit, BLOCKS, 2 * BLOCKS)
    assert set(backends) == {load_pack("nodes.host").exact_backend().name}
    sparge = load_pack("sparge")
    dense = sparge.attention(*qkv, sparge.SparsePolicy(topk=1.0), out_layout="NHD").flatten(2)
    assert torch.equal(got.given[0], torch.cat([dense] * 2)), "cond and uncond"
    true = torch.nn.functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
    assert not torch.equal(dense, true) and torch.allclose(dense, true, atol=0.1)


def test_a_layer_of_the_first_step_tells_what_exact_attention_takes(
    table, run, load_pack, monkeypatch
):
    """This model has two layers, of which the second tells it; larger ones have two that do."""
    monkeypatch.setattr(load_pack("sparge.tune.records").Spans, "times", lambda *given: True)
    event = Mock(elapsed_time=lambda end: 1000.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    table(2.0)
    got = run(start_percent=0.4, sigmas=(0.9, 0.85, 0.7, 0.5))
    time, way = got.last.time, load_pack("sparge.session").Way
    assert (got.counts.eight_bit, got.counts.dense) == (3 * BLOCKS - 1, 3 * BLOCKS)
    assert [step for step, of_step in time.by_step.items() if way.EXACT in of_step] == [0]
    assert not time.by_table


@pytest.mark.parametrize("widgets", [{"dense_blocks": "0-1"}, {"end_percent": 0.2}], ids=str)
def test_calls_that_the_user_wants_dense_are_in_eight_bits(table, run, widgets):
    table(2.0)
    counts = run(**widgets).counts
    assert (counts.eight_bit, counts.sparse) == (3 * BLOCKS, 0)


@pytest.mark.parametrize(("host", "faster"), [(3.9, True), (4.1, False)])
def test_the_gpu_waits_for_half_of_what_the_host_takes(table, run, host, faster):
    """The rest of a layer covers the other half."""
    table(2.0, host=host)
    assert run().counts.eight_bit == (BLOCKS if faster else 0)


def test_not_where_exact_is_faster_nor_in_manual_mode(table, run):
    table(0.5)
    assert run().counts.eight_bit == 0
    table(2.0)
    assert run(mode="manual").counts.eight_bit == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda attend, qkv: attend(*qkv, HEADS, **FLAGS, mask=torch.ones(TOKENS, TOKENS)),
        lambda attend, qkv: attend(*qkv, HEADS, **FLAGS, low_precision_attention=False),
        lambda attend, qkv: attend(*qkv, HEADS, **FLAGS, unknown=3),
        lambda attend, qkv: attend(qkv[0], *qkv[1:, :, :, :77], HEADS, **FLAGS),
        lambda attend, qkv: attend(*qkv[:, :, :, :64], HEADS, **FLAGS),
        lambda attend, qkv: attend(*qkv.float(), HEADS, **FLAGS),
    ],
    ids=["mask", "full precision", "unknown option", "cross", "short", "float32"],
)
def test_other_calls_stay_exact(table, run, call):
    table(2.0)
    counts = run(call, [0.9]).counts
    assert counts.eight_bit == 0 and counts.dense + counts.cross == BLOCKS


@pytest.mark.parametrize("where", ["before the last dense step", "dense_blocks", "no padding"])
def test_a_call_with_a_mask_stays_exact(table, run, where):
    """Also with one that may be padding, as long as it is not taken off."""
    mask = torch.zeros(1, 1, 1, TOKENS, dtype=torch.bfloat16)
    mask[..., -100:] = -1.0 if where == "no padding" else float("-inf")
    widgets = {"dense_blocks": "0-1"} if where == "dense_blocks" else {"start_percent": 0.5}
    table(2.0)
    got = run(
        lambda attend, qkv: attend(*qkv, HEADS, **FLAGS, mask=mask), (0.95, 0.9, 0.8), **widgets
    )
    first = where == "before the last dense step"  # without its padding a measured call may be
    assert got.counts.eight_bit <= (BLOCKS if first else 0)
    assert len({out.float().sum().item() for out in got.given[: BLOCKS if first else None]}) == 1


def test_another_nodes_attention_serves_dense_calls(table, run):
    """Nobody timed it."""
    served = []

    def other(func, *args, **kwargs):
        served.append(kwargs)
        return func(*args, **kwargs)

    def overwriting(patched):
        patched.transformer_options["optimized_attention_override"] = other

    table(2.0, sparse=3.0)
    counts = run(prepared=overwriting).counts
    assert counts.eight_bit == 0 and len(served) == counts.dense == BLOCKS
    assert counts.sparse == 2 * BLOCKS, "beside 8 bits it would not be"


def test_an_error_in_eight_bits_costs_no_picture(table, run, load_pack, monkeypatch, caplog):
    def fail(self):
        raise ZeroDivisionError("no")

    table(2.0)
    monkeypatch.setattr(load_pack("sparge.session").Call, "eight_bit", fail)
    counts = run().counts
    assert counts.eight_bit == 0 and counts.dense == BLOCKS
    assert caplog.text.count("a dense call was computed exact") == 1


def test_short_runs_that_do_not_pay_are_in_eight_bits(table, run, load_pack, monkeypatch):
    table(2.0)
    monkeypatch.setattr(load_pack("sparge.speed.measuring_cost"), "CHOOSING", 10.0)
    counts = run().counts
    assert (counts.eight_bit, counts.sparse) == (3 * BLOCKS, 0)
    assert counts.reasons["too few steps are left to pay for measuring"] == 2 * BLOCKS


@pytest.mark.parametrize("error", [RuntimeError("no kernel image"), NotImplementedError("sage")])
def test_a_backend_that_cannot_be_timed_costs_no_run(
    run, table, load_pack, monkeypatch, caplog, error
):
    hook, asked = load_pack("nodes.hook"), []

    def fail(device, backend):
        asked.append(backend.name)
        raise error

    ready = SimpleNamespace(wait=lambda check: None)
    monkeypatch.setattr(hook.Hook, "prepare_kernels", lambda self, device: ready)
    monkeypatch.setattr(load_pack("sparge.session.session"), "speed_table", fail)
    table(2.0)
    assert run().counts.sparse == 2 * BLOCKS and len(asked) == 1
    assert "the speed of this GPU was not measured" in caplog.text


@pytest.mark.parametrize("mode", ["manual", "auto budget", "auto quality"])
def test_wrong_kernels_keep_every_run_exact_and_are_told(
    run, table, load_pack, monkeypatch, caplog, qkv, mode
):
    why, state = "the kernels err", load_pack("sparge.session.session")

    def refuse(device, backend):
        raise load_pack("sparge.speed.self_test").WrongKernels(why)

    ready = SimpleNamespace(wait=lambda check: None)
    monkeypatch.setattr(load_pack("nodes.hook").Hook, "prepare_kernels", lambda *_: ready)
    monkeypatch.setattr(state, "speed_table", refuse)
    table(2.0)
    exact = torch.nn.functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
    for _ in range(2):
        got = run(mode=mode)
        assert "NOTHING WAS SPARSE" in got.line and f"dense because: {why} (" in got.line
        assert (got.counts.sparse, got.counts.eight_bit) == (0, 0)
        assert all(torch.equal(out, exact.expand_as(out)) for out in got.given)
    assert "not measured" not in caplog.text


def test_a_backend_is_named_with_its_version_and_pytorchs_order(load_pack, monkeypatch):
    host = load_pack("nodes.host")

    def attention_pytorch(): ...

    def attention_sage(): ...

    versions = {"sageattention": "2.2.0"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    host._version.cache_clear()
    ordered = SimpleNamespace(SDPA_BACKEND_PRIORITY=[SimpleNamespace(name="FLASH_ATTENTION")])
    assert host.backend_name(attention_pytorch) == "attention_pytorch"
    monkeypatch.setitem(sys.modules, "comfy.ops", ordered)
    assert host.backend_name(attention_pytorch) == "attention_pytorch FLASH_ATTENTION"
    assert host.backend_name(attention_sage) == "attention_sage 2.2.0 FLASH_ATTENTION"
    host._version.cache_clear()

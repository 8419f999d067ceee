# SPDX-License-Identifier: Apache-2.0
"""Dense calls of the auto modes are in 8 bits where the speed table says that this is faster."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

HEADS, TOKENS, BLOCKS = 2, 512, 2
PAIRS = HEADS * TOKENS**2
LATENT = (8, 16, 16)
AUTO = {"mode": "auto budget", "topk": 0.5, "min_tokens": TOKENS}


@pytest.fixture
def table(load_pack, monkeypatch):
    """table(exact seconds): makes this the speed table of calls that keep every pair; 8-bit dense
    ones take a second, and measurements no time."""
    speed, backends = load_pack("sparge.speed"), []
    monkeypatch.delenv("SPARGE_REFERENCE", raising=False)
    monkeypatch.setattr(load_pack("sparge.tune.ways"), "FEWEST_TOKENS", 1)
    monkeypatch.setattr(load_pack("nodes.run_state"), "unusable_reason", lambda device: None)

    def pretend(exact, sparse=0.1):
        cost = [speed.Cost(0, 0, 0, seconds / PAIRS) for seconds in (exact, 1.0, sparse)]
        found = speed.SpeedTable({}, "", {64: speed.Times(*cost, margin=0.0)})

        def known(device, backend):
            backends.append(backend.name)
            return found

        monkeypatch.setattr(load_pack("nodes.run_state"), "known_table", known)
        return backends

    return pretend


@pytest.fixture
def sample(patched_wan, session, runs, generator):
    """sample(**widgets): a run of two blocks and three steps, the first one dense; its tally and
    what the calls gave."""
    drawn = torch.randn(3, 1, HEADS, TOKENS, 64, generator=generator, dtype=torch.bfloat16)

    def run(calls=BLOCKS, sigmas=(0.9, 0.7, 0.5), previous=None, call=None, **widgets):
        patched, given = patched_wan(**(AUTO | widgets)), []
        if previous is not None:
            patched.model_options["transformer_options"]["optimized_attention_override"] = previous

        def step(attend):
            for _ in range(calls):
                one = call or (lambda: attend(*drawn, HEADS, skip_reshape=True))
                given.append(one() if call is None else call(attend, drawn))

        session(patched, LATENT).sample(step, list(sigmas))
        return runs[-1][0].tally, given

    return run


@pytest.mark.parametrize("mode", ["auto budget", "auto quality"])
def test_the_dense_steps_are_in_eight_bits_and_measured(table, sample, load_pack, mode):
    backends = table(2.0)
    tally, _ = sample(mode=mode)
    assert (tally.eight_bit, tally.dense, tally.sparse) == (BLOCKS, BLOCKS, 2 * BLOCKS)
    exact, _ = sample(mode=mode, exact_dense=True)
    assert (exact.eight_bit, exact.dense, exact.sparse) == (0, BLOCKS, 2 * BLOCKS)
    assert set(backends) == {load_pack("nodes.host").exact_backend().name}


def test_the_result_is_that_of_eight_bits(table, sample, generator, load_pack):
    table(2.0)
    drawn = []

    def call(attend, qkv):
        drawn.append(qkv)
        return attend(*qkv, HEADS, skip_reshape=True)

    _, given = sample(call=call)
    sparge = load_pack("sparge")
    dense = sparge.attention(*drawn[0], sparge.SparsePolicy(topk=1.0), out_layout="NHD").flatten(2)
    assert torch.equal(given[0], torch.cat([dense] * 2)), "cond and uncond"
    exact = torch.nn.functional.scaled_dot_product_attention(*drawn[0]).transpose(1, 2).flatten(2)
    assert not torch.equal(given[0][:1], exact) and torch.allclose(given[0][:1], exact, atol=0.1)


@pytest.mark.parametrize("widgets", [{"dense_blocks": "0-1"}, {"end_percent": 0.2}])
def test_calls_that_the_user_wants_dense_are_in_eight_bits(table, sample, widgets):
    table(2.0)
    tally, _ = sample(**widgets)
    assert (tally.eight_bit, tally.sparse) == (3 * BLOCKS, 0)


def test_not_where_exact_is_faster_nor_in_manual_mode(table, sample):
    table(0.5)
    assert sample()[0].eight_bit == 0
    table(2.0)
    assert sample(mode="manual")[0].eight_bit == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda attend, qkv: attend(*qkv, HEADS, skip_reshape=True, mask=torch.ones(TOKENS, TOKENS)),
        lambda attend, qkv: attend(*qkv, HEADS, skip_reshape=True, low_precision_attention=False),
        lambda attend, qkv: attend(*qkv, HEADS, skip_reshape=True, unknown=3),
        lambda attend, qkv: attend(qkv[0], *qkv[1:, :, :, :77], HEADS, skip_reshape=True),
        lambda attend, qkv: attend(*qkv[:, :, :, :64], HEADS, skip_reshape=True),
        lambda attend, qkv: attend(*qkv.float(), HEADS, skip_reshape=True),
    ],
    ids=["mask", "full precision", "unknown option", "cross", "short", "float32"],
)
def test_other_calls_stay_exact(table, sample, call):
    table(2.0)
    tally, _ = sample(call=call, sigmas=(0.9,))
    assert tally.eight_bit == 0 and tally.dense + tally.cross == BLOCKS


@pytest.mark.parametrize("where", ["before the last dense step", "dense_blocks", "no padding"])
def test_a_call_with_a_mask_stays_exact(table, sample, where):
    """Also with one that may be padding, as long as it is not taken off."""
    mask = torch.zeros(1, 1, 1, TOKENS, dtype=torch.bfloat16)
    mask[..., -100:] = -1.0 if where == "no padding" else float("-inf")

    def call(attend, qkv):
        return attend(*qkv, HEADS, skip_reshape=True, mask=mask)

    widgets = {"dense_blocks": "0-1"} if where == "dense_blocks" else {"start_percent": 0.5}
    table(2.0)
    tally, given = sample(call=call, sigmas=(0.95, 0.9, 0.8), **widgets)
    if where == "before the last dense step":
        assert tally.eight_bit <= BLOCKS, "without its padding a measured call may be"
        given = given[:BLOCKS]
    else:
        assert tally.eight_bit == 0
    assert len({out.float().sum().item() for out in given}) == 1


def test_another_nodes_attention_serves_dense_calls(table, sample):
    """Nobody timed it."""
    served = []

    def other(func, *args, **kwargs):
        served.append(kwargs)
        return func(*args, **kwargs)

    table(2.0, sparse=3.0)
    tally, _ = sample(previous=other)
    assert tally.eight_bit == 0 and len(served) == tally.dense == BLOCKS
    assert tally.sparse == 2 * BLOCKS, "beside 8 bits it would not be"


def test_an_error_in_eight_bits_costs_no_picture(table, sample, load_pack, monkeypatch, caplog):
    def fail(self):
        raise ZeroDivisionError("no")

    table(2.0)
    monkeypatch.setattr(load_pack("sparge.tune").Call, "eight_bit", fail)
    tally, _ = sample()
    assert tally.eight_bit == 0 and tally.dense == BLOCKS
    assert caplog.text.count("a dense call was computed exact") == 1


def test_short_runs_that_do_not_pay_are_in_eight_bits(table, sample, load_pack, monkeypatch):
    table(2.0)
    monkeypatch.setattr(load_pack("sparge.speed.measuring_cost"), "CHOOSING", 10.0)
    tally, _ = sample()
    assert (tally.eight_bit, tally.sparse) == (3 * BLOCKS, 0)
    assert tally.reasons["too few steps are left to pay for measuring"] == 2 * BLOCKS


@pytest.mark.parametrize("error", [RuntimeError("no kernel image"), NotImplementedError("sage")])
def test_a_backend_that_cannot_be_timed_costs_no_run(
    sample, table, load_pack, monkeypatch, caplog, error
):
    hook, asked = load_pack("nodes.hook"), []

    def fail(device, backend):
        asked.append(backend.name)
        raise error

    ready = SimpleNamespace(wait=lambda check: None)
    monkeypatch.setattr(hook.Hook, "prepare_kernels", lambda self, device: ready)
    monkeypatch.setattr(hook, "speed_table", fail)
    table(2.0)
    tally, _ = sample()
    assert tally.sparse == 2 * BLOCKS and len(asked) == 1
    assert "the speed of this GPU was not measured" in caplog.text


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

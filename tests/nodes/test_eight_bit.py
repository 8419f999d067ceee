# SPDX-License-Identifier: Apache-2.0
"""Dense calls of the auto modes are in 8 bits where the times of such calls say that this is
faster."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.nodes.parts import BLOCKS, EIGHT_BIT, HEADS, relative_error

TOKENS = 512
STATE = "sparge.session.session"
FLAGS = {"skip_reshape": True}


@pytest.fixture
def timed(load_pack, monkeypatch):
    """timed(exact seconds): makes these the times of calls that keep every pair; 8-bit dense ones
    take a second. Gives the names of the functions for exact attention that were asked for."""
    timing, state, names = load_pack("sparge.session.timing"), load_pack(STATE), []
    monkeypatch.delenv("SPARGE_REFERENCE", raising=False)
    monkeypatch.setattr(state, "unusable_reason", lambda device: None)

    def pretend(seconds, sparse=0.1):
        def times_of(call, exact, grid):
            names.append(exact.name)
            return timing.Times(call.query_tokens, seconds, 1.0, 0.0, sparse, 0.0)

        monkeypatch.setattr(state, "times_of", times_of)
        return names

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
def test_the_dense_steps_are_in_eight_bits_and_measured(timed, run, load_pack, qkv, mode):
    names = timed(2.0)
    got, exact = run(mode=mode), run(mode=mode, exact_dense=True)
    for each, eight_bit in ((got, BLOCKS), (exact, 0)):
        counts = each.counts
        assert (counts.eight_bit, counts.dense, counts.sparse) == (eight_bit, BLOCKS, 2 * BLOCKS)
    assert set(names) == {load_pack("nodes.comfyui").exact_backend().name}
    true = torch.nn.functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
    true = torch.cat([true] * 2)  # cond and uncond
    assert 0 < relative_error(got.given[0], true) < EIGHT_BIT
    assert torch.equal(exact.given[0], true)


def test_sparse_calls_that_are_slower_are_left_out_in_mode_manual_too(timed, run):
    timed(2.0, sparse=6.0)
    counts = run(mode="manual").counts
    assert counts.eight_bit == counts.sparse == 0
    assert any("sparse is faster only below" in why for why in counts.reasons)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda attend, qkv: attend(*qkv, HEADS, **FLAGS, mask=torch.ones(TOKENS, TOKENS)),
            "attention mask",
        ),
        (
            lambda attend, qkv: attend(*qkv, HEADS, **FLAGS, low_precision_attention=False),
            "the model asks for full precision here",
        ),
        (
            lambda attend, qkv: attend(*qkv, HEADS, **FLAGS, unknown=3, is_causal=True),
            "the model uses an option unknown here (unknown, is_causal)",
        ),
    ],
    ids=["mask", "full precision", "unknown options"],
)
def test_other_calls_stay_exact(timed, run, call, why):
    timed(2.0)
    counts = run(call, [0.9]).counts
    assert counts.eight_bit == 0 and counts.reasons == {why: BLOCKS}


def test_another_nodes_attention_serves_dense_calls(timed, run):
    """Nobody timed it."""
    served = []

    def other(func, *args, **kwargs):
        served.append(kwargs)
        return func(*args, **kwargs)

    def overwriting(patched):
        patched.transformer_options["optimized_attention_override"] = other

    timed(2.0, sparse=2.3)
    counts = run(prepared=overwriting).counts
    assert counts.eight_bit == 0 and len(served) == counts.dense == BLOCKS
    assert counts.sparse == 2 * BLOCKS, "beside 8 bits it would not be"


def test_a_backend_is_named_with_its_version_and_pytorchs_order(load_pack, monkeypatch):
    host = load_pack("nodes.comfyui")

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

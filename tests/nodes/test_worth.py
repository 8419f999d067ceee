# SPDX-License-Identifier: Apache-2.0
"""Calls that would be slower sparse stay dense, with a reason; elsewhere nothing changes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

HEADS, BLOCKS = 2, 2
LATENT = (4, 16, 16)
TOKENS = 4 * 8 * 8
PAIRS = HEADS * TOKENS**2


class WanModel(torch.nn.LayerNorm):
    """Model of which the node sees its name and sizes alone."""

    patch_size, num_heads, blocks = (1, 2, 2), HEADS, range(BLOCKS)


@pytest.fixture
def break_even(load_pack, monkeypatch):
    """break_even(density): makes this the one of the test's calls; flash is twice as slow as cuDNN,
    so its break-even is twice that."""
    worth, node = load_pack("sparge.speed.worth"), load_pack("sparge.tune.worth")
    monkeypatch.delenv("SPARGE_REFERENCE", raising=False)
    monkeypatch.setattr(node, "FEWEST_TOKENS", TOKENS)
    monkeypatch.setattr(load_pack("nodes.run_state"), "unusable_reason", lambda device: None)

    def pretend(density):
        sparse = worth.SparseRates(0, 0, 0, 0, pair=1 / PAIRS, filter_pair=0, pool_token=0)
        cudnn, flash = (worth.DenseRates(0, 0, times * density / PAIRS) for times in (1, 2))
        rates = worth.Rates(sparse, {"cudnn": cudnn, "flash": flash}, margin=0.0)
        monkeypatch.setattr(node, "rates_for", lambda gpu, head_dim: rates)

    return pretend


@pytest.fixture
def sample(patcher, load_pack, session, generator, runs):
    """sample(**widgets): a run of two blocks and three steps; its tally."""

    drawn = torch.randn(BLOCKS, 3, 1, TOKENS, HEADS * 64, generator=generator)

    def run(dtype=torch.bfloat16, sigmas=(0.9, 0.7, 0.5), **widgets):
        patcher.model.diffusion_model = WanModel(8)
        node = load_pack("nodes.sparge_attention").SpargeAttention
        patched = node.execute(patcher, **({"min_tokens": TOKENS} | widgets))[0]

        def step(attend):
            return [attend(*qkv, HEADS) for qkv in drawn.to(dtype)]

        session(patched, LATENT).sample(step, list(sigmas))
        return runs[-1][0].tally

    return run


def test_manual_mode_goes_by_topk(break_even, sample):
    break_even(0.4)
    assert sample(topk=0.3).sparse == 2 * BLOCKS
    tally = sample(topk=0.5)
    assert tally.sparse == 0
    assert tally.reasons == {
        "before start_percent 0.2": BLOCKS,
        "at 256 tokens sparse is faster only below 40 % density": 2 * BLOCKS,
    }


def test_manual_mode_counts_text_as_dense(break_even, load_pack, patcher, session, runs):
    """Text makes 70 of 326 tokens: a query block that ranks in 30 % keeps 62 % of all pairs."""
    flux = type("Flux", (WanModel,), {"patch_size": 2})
    node = load_pack("nodes.sparge_attention").SpargeAttention
    q = torch.randn(1, TOKENS + 70, HEADS * 64, dtype=torch.bfloat16)

    def sparse_calls(break_even_density):
        break_even(break_even_density)
        patcher.model.diffusion_model = flux(8)
        patched = node.execute(patcher, min_tokens=TOKENS, topk=0.3)[0]
        session(patched, LATENT).sample(lambda attend: attend(q, q, q, HEADS), [0.5])
        return runs[-1][0].tally.sparse

    assert sparse_calls(0.55) == 0
    assert sparse_calls(0.7) == 1


def test_even_a_call_that_drops_nothing_may_be_faster(break_even, sample):
    break_even(1.2)
    assert sample(topk=1.0).sparse == 2 * BLOCKS


def test_no_opinion_about_cdf_float32_and_unmeasured_gpus(
    break_even, sample, load_pack, monkeypatch
):
    known = load_pack("sparge.tune.worth").rates_for
    break_even(0.0)
    assert sample(select_by="cdf").sparse == 2 * BLOCKS
    assert sample(dtype=torch.float32).sparse == 2 * BLOCKS
    assert sample().reasons["at 256 tokens sparse would be slower"] == 2 * BLOCKS
    monkeypatch.setattr(load_pack("sparge.tune.worth"), "rates_for", known)
    assert sample(topk=1.0).sparse == 2 * BLOCKS, "a CPU"


def test_short_calls_that_the_user_asked_for_are_sparse(break_even, sample, load_pack, monkeypatch):
    break_even(0.0)
    settings = load_pack("nodes.settings").Settings
    monkeypatch.setattr(load_pack("sparge.tune.worth"), "FEWEST_TOKENS", settings.min_tokens)
    assert settings.min_tokens > TOKENS
    assert sample().sparse == 2 * BLOCKS


def test_a_debugging_aid_makes_slow_calls_sparse(break_even, sample, monkeypatch):
    break_even(0.0)
    monkeypatch.setenv("SPARGE_REFERENCE", "1")
    assert sample().sparse == 2 * BLOCKS


def test_auto_modes_go_by_what_the_heads_of_a_layer_keep(break_even, sample, runs):
    break_even(0.9)
    # Of four key blocks a head keeps two or all: here one of the four heads all.
    widgets = {"mode": "auto budget", "topk": 0.65, "sigmas": (0.9, 0.7)}
    assert sample(**widgets).sparse == BLOCKS
    (table,) = runs[-1][0].session.tables.chosen
    sparser, denser = sorted(table.density()[:BLOCKS].mean(1).tolist())
    break_even((sparser + denser) / 2)
    tally = sample(**widgets)
    assert tally.sparse == 1
    (reason,) = set(tally.reasons) - {"before start_percent 0.2"}
    assert reason.startswith("at 256 tokens sparse is faster only below")
    assert tally.reasons[reason] == 1


def test_what_can_never_be_faster_is_not_measured(break_even, sample, runs):
    break_even(0.0)
    for mode in ("auto quality", "auto budget"):
        tally = sample(mode=mode, sigmas=(0.7, 0.5, 0.3))
        assert tally.reasons == {"at 256 tokens sparse would be slower": 3 * BLOCKS}
        assert not runs[-1][0].session.tables.chosen


@pytest.fixture
def why(load_pack, monkeypatch):
    """why(density, ...): the reason of a call that keeps so much."""
    module = load_pack("sparge.tune.call")

    def reason(density, order=(), kv_heads=HEADS, kernel="flash"):
        monkeypatch.setattr(module, "torch_kernel", lambda *args: kernel)
        q = torch.zeros(1, HEADS, TOKENS, 64, dtype=torch.bfloat16)
        k = q[:, :kv_heads]
        call = module.Call(q, k, k, sdpa_order=order)
        return load_pack("sparge.tune.worth").slower_reason(call, density, False, None)

    return reason


def test_the_kernel_that_pytorch_takes_counts_where_it_is_known(break_even, why):
    break_even(0.4)
    assert why(0.7) is None, "flash takes twice as long"
    assert "below 80 %" in why(0.85)
    for unlike in ({"kernel": "cudnn"}, {"kernel": ""}, {"order": None}):
        assert "below 40 %" in why(0.7, **unlike)
    assert "below 40 %" in why(0.7, kv_heads=1)


def test_who_serves_dense_calls(load_pack, monkeypatch):
    order = load_pack("nodes.host").sdpa_order

    def attention_pytorch(): ...

    def attention_sage(): ...

    assert order(attention_sage) is None and order(None) is None
    assert order(attention_pytorch) == ()
    ordered = SimpleNamespace(SDPA_BACKEND_PRIORITY=[SDPBackend.FLASH_ATTENTION])
    monkeypatch.setitem(sys.modules, "comfy.ops", ordered)
    assert order(attention_pytorch) == [SDPBackend.FLASH_ATTENTION]


def test_the_dense_path_of_a_call_is_told(patcher, load_pack, monkeypatch):
    """Only where no other node serves the dense calls."""
    hook, seen = load_pack("nodes.hook"), []

    def attention_pytorch(*args, **kwargs): ...

    forward = SimpleNamespace(attend=lambda call, dense: seen.append(call.sdpa_order))
    for previous in (None, lambda *args, **kwargs: None):
        owner = hook.Hook(load_pack("nodes.settings").Settings(), None)
        forward.run = SimpleNamespace(owner=owner)
        q = torch.zeros(1, TOKENS, 64)
        options = {hook.FORWARD_KEY: forward}
        override = hook.make_override(owner, previous)
        override(attention_pytorch, q, q, q, 1, transformer_options=options)
    assert seen == [(), None]

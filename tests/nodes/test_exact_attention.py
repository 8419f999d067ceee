# SPDX-License-Identifier: Apache-2.0
"""Exact attention by the faster one of PyTorch's kernels, where that is known and allowed."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEADS, ROWS, KEYS = 2, 256, 77


@pytest.fixture
def cross(load_pack, monkeypatch):
    """cross(**changes): what a call gives whose kernel, as ComfyUI asks for it, is twice as slow as
    the CPU's flash attention; and its q, k, v with heads first."""
    module, calls = load_pack("sparge.tune.worth"), load_pack("nodes.attention_call")
    worth = load_pack("sparge.speed.worth")
    dense = {"cudnn": worth.DenseRates(0, 0, 2e-12), "flash": worth.DenseRates(0, 0, 1e-12)}
    sparse = worth.SparseRates(0, 0, 0, 0, pair=1e-12, filter_pair=0, pool_token=0)
    monkeypatch.setattr(module, "known_rates", lambda call: worth.Rates(sparse, dense, margin=0.1))
    monkeypatch.setattr(load_pack("sparge.tune.call"), "torch_kernel", lambda *args: "cudnn")

    def call(order=(), heads_first=False, kv_heads=HEADS, **options):
        q = torch.randn(2, ROWS, HEADS * 64, dtype=torch.bfloat16)
        k, v = torch.randn(2, 2, KEYS, kv_heads * 64, dtype=torch.bfloat16)
        q4, k4, v4 = (x.unflatten(-1, (-1, 64)).transpose(1, 2) for x in (q, k, v))
        given = (q4, k4, v4) if heads_first else (q, k, v)
        made = calls.AttentionCall(*given, HEADS, None, heads_first, heads_first, options, order)
        return module.by_faster_kernel(made.tensors), (q4, k4, v4)

    return call


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_the_result_is_that_of_exact_attention(cross, heads_first, scale):
    out, qkv = cross(heads_first=heads_first, scale=scale)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = scaled_dot_product_attention(*qkv, scale=scale)
    assert torch.equal(out, expected if heads_first else expected.transpose(1, 2).flatten(2))


def test_what_else_serves_or_is_asked_stays(cross):
    assert cross()[0] is not None
    assert cross(order=None)[0] is None, "another node or another attention serves"
    assert cross(kv_heads=1)[0] is None
    assert cross(window=3)[0] is None, "an option unknown here"


@pytest.mark.usefixtures("reference_allowed")
def test_only_in_passes_that_may_be_sparse(
    patcher, load_pack, session, generator, runs, monkeypatch
):
    """The first of three steps is dense."""
    served = []

    def faster(call):
        served.append(call)
        return call.result(torch.zeros_like(call.q))

    monkeypatch.setattr(load_pack("nodes.forward"), "by_faster_kernel", faster)
    patched = load_pack("nodes.sparge_attention").SpargeAttention.execute(patcher)[0]
    q = torch.randn(1, ROWS, HEADS * 64, generator=generator)
    k = q[:, :KEYS]

    def step(attend):
        return [attend(q, k, k, HEADS), attend(q, k, k, HEADS, mask=torch.ones(ROWS, KEYS))]

    session(patched, (4, 16, 16)).sample(step, [0.9, 0.7, 0.5])
    tally = runs[-1][0].tally
    assert (len(served), tally.faster_cross, tally.cross) == (2, 2, 6)

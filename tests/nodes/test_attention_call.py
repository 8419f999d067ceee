# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's four layouts against dense attention, and that only views reach the library."""

from __future__ import annotations

import pytest
import torch

#: Everything kept: what is left is the error of 8-bit arithmetic (and of bf16 for fp32 inputs).
EIGHT_BIT = 0.02


@pytest.fixture(scope="module")
def calls(load_pack):
    return load_pack("nodes.attention_call")


@pytest.fixture(scope="module")
def module(load_pack):
    """Module that asks the library."""
    return load_pack("sparge.tune.call")


@pytest.fixture(scope="module")
def everything(load_pack):
    return load_pack("sparge").SparsePolicy(topk=1.0)


def relative_error(got, expected):
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def qkv(generator, layout, heads=4, kv_heads=4, tokens=200, head_dim=64, dtype=torch.float32):
    """Random q, k, v: flat, or heads first in memory that is heads last, as Mochi has it."""

    def draw(count):
        x = torch.randn(2, tokens, count, head_dim, generator=generator).to(dtype)
        return x.flatten(2) if layout == "flat" else x.transpose(1, 2)

    return draw(heads), draw(kv_heads), draw(kv_heads)


@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("layout", ["flat", "heads first"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_layouts(
    calls,
    module,
    everything,
    load_pack,
    generator,
    monkeypatch,
    layout,
    kv_heads,
    skip_output_reshape,
):
    q, k, v = qkv(generator, layout, kv_heads=kv_heads)
    flags = {"skip_reshape": layout != "flat", "skip_output_reshape": skip_output_reshape}
    stats = load_pack("sparge").AttentionStats("cpu")
    pointers = []
    library = module.attention

    def spy(*args, **kwargs):
        out = library(*args, **kwargs)
        pointers.extend(x.data_ptr() for x in (*args[:3], out))
        return out

    monkeypatch.setattr(module, "attention", spy)
    call = calls.AttentionCall(q, k, v, 4, None, options={"scale": 0.1}, **flags)
    out = call.tensors.sparse(everything, stats)
    expected = dense(q, k, v, 4, scale=0.1, **flags)
    assert out.shape == expected.shape
    assert relative_error(out, expected) < EIGHT_BIT
    assert pointers == [x.data_ptr() for x in (q, k, v, out)]
    assert stats.calls == 1 and stats.density == 1.0


def dense(q, k, v, heads, skip_reshape, skip_output_reshape, scale=None):
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k.to(q.dtype), v.to(q.dtype), enable_gqa=True, scale=scale
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_has_the_dtype_of_q(calls, everything, load_pack, generator, q_dtype, v_dtype):
    q, k, v = qkv(generator, "flat", dtype=q_dtype)
    call = calls.AttentionCall(q, k, v.to(v_dtype), 4, None, False, False, {})
    out = call.tensors.sparse(everything, load_pack("sparge").AttentionStats("cpu"))
    assert out.dtype == q_dtype
    assert relative_error(out, dense(q, k, v, 4, None, False)) < EIGHT_BIT


class LoaderTensor(torch.Tensor):
    """Tensor like a GGUF loader's class, which allocates its own kind and takes a copy for a
    waste.
    """

    def new_empty(self, *args, **kwargs):
        raise AssertionError("the library allocates plain tensors")

    def clone(self, *args, **kwargs):
        return self


@pytest.mark.parametrize("layout", ["flat", "heads first"])
def test_the_library_gets_plain_tensors(
    calls, module, everything, load_pack, generator, monkeypatch, layout
):
    q, k, v = qkv(generator, layout)
    library, received = module.attention, []

    def spy(*args, **kwargs):
        received.extend(args[:3])
        return library(*args, **kwargs)

    monkeypatch.setattr(module, "attention", spy)
    theirs = (x.as_subclass(LoaderTensor) for x in (q, k))
    call = calls.AttentionCall(*theirs, v, 4, None, layout != "flat", False, {})
    out = call.tensors.sparse(everything, load_pack("sparge").AttentionStats("cpu"))
    assert [type(x) for x in (*received, out)] == 4 * [torch.Tensor]
    assert [x.data_ptr() for x in received] == [x.data_ptr() for x in (q, k, v)]
    assert relative_error(out, dense(q, k, v, 4, layout != "flat", False)) < EIGHT_BIT


def test_what_the_library_cannot_serve_it_refuses_with_a_reason(
    calls, everything, load_pack, generator
):
    q, k, v = qkv(generator, "flat", heads=1, kv_heads=1, head_dim=256)
    call = calls.AttentionCall(q, k, v, 1, None, False, False, {})
    with pytest.raises(load_pack("sparge").Unsupported, match="head_dim"):
        call.tensors.sparse(everything, load_pack("sparge").AttentionStats("cpu"))


@pytest.mark.parametrize(
    ("options", "unknown"),
    [
        ({"transformer_options": {}, "_inside_attn_wrapper": True, "enable_gqa": True}, ()),
        ({"scale": 0.5, "low_precision_attention": True, "preferred_attention": object()}, ()),
        ({"is_causal": False, "window": None}, ()),
        ({"is_causal": True}, ("is_causal",)),
    ],
)
def test_options_that_would_change_the_result_are_noticed(calls, generator, options, unknown):
    q, k, v = qkv(generator, "flat")
    facts = calls.AttentionCall(q, k, v, 4, None, False, False, options).facts
    assert facts.unknown_options == unknown
    assert not facts.refuses_low_precision

# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's four layouts against dense attention, and that only views reach the library."""

from __future__ import annotations

import pytest
import torch

from tests.nodes.parts import EIGHT_BIT, relative_error


@pytest.fixture(scope="module")
def calls(load_pack):
    return load_pack("nodes.attention_call")


@pytest.fixture(scope="module")
def sparse(load_pack):
    """sparse(call): its result with everything kept."""
    sparge = load_pack("sparge")

    def of(call):
        stats = sparge.AttentionStats("cpu")
        out = call.sparse(sparge.SparsePolicy(topk=1.0), stats)
        assert stats.calls == 1 and stats.density == 1.0
        return out

    return of


def qkv(generator, layout, kv_heads=4, tokens=200, dtype=torch.float32):
    """Random q, k, v: flat, or heads first in memory that is heads last, as Mochi has it."""

    def draw(count):
        x = torch.randn(2, tokens, count, 64, generator=generator).to(dtype)
        return x.flatten(2) if layout == "flat" else x.transpose(1, 2)

    return draw(4), draw(kv_heads), draw(kv_heads)


def dense(q, k, v, heads, skip_reshape, skip_output_reshape, scale=None):
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k.to(q.dtype), v.to(q.dtype), enable_gqa=True, scale=scale
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class LoaderTensor(torch.Tensor):
    """Tensor like a GGUF loader's class, which allocates its own kind and takes a copy for a
    waste.
    """

    def new_empty(self, *args, **kwargs):
        raise AssertionError("the library allocates plain tensors")

    def clone(self, *args, **kwargs):
        return self


@pytest.mark.parametrize("loader", [False, True], ids=["", "of a GGUF loader"])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("layout", ["flat", "heads first"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_layouts(calls, sparse, asked, generator, layout, kv_heads, skip_output_reshape, loader):
    q, k, v = qkv(generator, layout, kv_heads=kv_heads)
    flags = {"skip_reshape": layout != "flat", "skip_output_reshape": skip_output_reshape}
    theirs = (x.as_subclass(LoaderTensor) if loader else x for x in (q, k))
    out = sparse(calls.call_of((*theirs, v, 4), {"scale": 0.1, **flags}))
    expected = dense(q, k, v, 4, scale=0.1, **flags)
    assert out.shape == expected.shape and relative_error(out, expected) < EIGHT_BIT
    (call,) = asked
    assert [x.data_ptr() for x in call.tensors] == [x.data_ptr() for x in (q, k, v, out)]
    assert {type(x) for x in (*call.tensors, out)} == {torch.Tensor}


@pytest.mark.parametrize(
    ("options", "unknown"),
    [
        ({"transformer_options": {}, "_inside_attn_wrapper": True, "enable_gqa": True}, False),
        ({"scale": 0.5, "low_precision_attention": True, "preferred_attention": object()}, False),
        ({"is_causal": False, "window": None}, False),
        ({"is_causal": True}, True),
    ],
)
def test_options_that_would_change_the_result_are_noticed(calls, generator, options, unknown):
    q, k, v = qkv(generator, "flat")
    why = "the model uses an option unknown here (is_causal)" if unknown else None
    assert calls.call_of((q, k, v, 4), options).why_exact == why

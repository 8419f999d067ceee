# SPDX-License-Identifier: Apache-2.0
"""Calls as later versions of ComfyUI make them, and calls that nobody makes yet: whatever comes,
the model's own attention gets it as it came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.nodes.conftest import backend
from tests.nodes.parts import BLOCKS, EIGHT_BIT, HEADS, TOKENS, relative_error

pytestmark = pytest.mark.usefixtures("reference_allowed")

KEY = "optimized_attention_override"
UNKNOWN = "the model calls attention in a way unknown here"
#: One dense step, two sparse ones.
LEVELS = [0.9, 0.5, 0.4]


class Container:
    """Owner of a tensor, which it hands over once."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take(self):
        tensor, self.tensor = self.tensor, None
        return tensor


def called(options, *tensors, preferred_attention=None, func: Any = backend, **kwargs):
    """A call as ComfyUI makes it from 0.38 on: what the model prefers does not get to an override,
    and containers do only where it says that it takes them."""
    kwargs |= {"transformer_options": options, "_inside_attn_wrapper": True}
    override = options[KEY]
    if isinstance(tensors[0], Container):
        if hasattr(override, "container_function"):
            return override.container_function(*tensors, **kwargs)
        tensors = [container.take() for container in tensors]
    return override(func, *tensors, **kwargs)


@pytest.fixture
def qkv(generator):
    return torch.randn(3, 1, TOKENS, HEADS * 64, generator=generator).unbind()


@pytest.fixture
def ran(load_pack, sampled, qkv, monkeypatch):
    """ran(call, ...): a run whose layers call call(options, q, k, v)."""

    monkeypatch.setattr(load_pack("nodes.comfyui"), "ASKING", called.__code__)

    def run(call, levels=LEVELS, **given):
        def step(attend):
            return [call(attend.options, *qkv) for _ in range(BLOCKS)]

        return sampled(step, levels, topk=1.0, **given)

    return run


@pytest.mark.parametrize("as_containers", [False, True])
@pytest.mark.parametrize("mode", ["manual", "auto budget"])
def test_what_a_model_prefers_serves_its_dense_calls(ran, qkv, mode, as_containers):
    calls = []

    def preferred(*args, **kwargs):
        calls.append(kwargs)
        return backend(*args, **kwargs)

    def call(options, *tensors):
        if as_containers:
            tensors = [Container(x) for x in tensors]
        chosen = SimpleNamespace(function=preferred)
        return called(options, *tensors, heads=HEADS, preferred_attention=chosen)

    got = ran(call, mode=mode)
    assert (got.counts.sparse, len(calls)) == (2 * BLOCKS, BLOCKS)
    assert calls[0].keys() == {"heads", "transformer_options", "_inside_attn_wrapper"}
    expected = backend(*qkv, heads=HEADS)
    assert torch.equal(got.given[0][0], expected)
    assert relative_error(got.given[2][0], expected) < 2 * EIGHT_BIT


def test_an_override_goes_before_what_the_model_prefers(ran):
    """As without our node."""

    def preferred(*args, **kwargs):
        raise AssertionError("the user chose another")

    def chosen(func, *args, **kwargs):
        assert func is backend
        return func(*args, **kwargs)

    given = {"heads": HEADS, "preferred_attention": SimpleNamespace(function=preferred)}
    got = ran(
        lambda options, *qkv: called(options, *qkv, **given),
        prepared=lambda patched: patched.transformer_options.update({KEY: chosen}),
    )
    assert got.counts.sparse == 2 * BLOCKS


class Quantized(torch.Tensor):
    """Tensor whose numbers are elsewhere, as those of quantized weights are."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("nobody computes with it")


CALLS = {
    "containers": lambda q, k, v: ((Container(q), Container(k), Container(v), HEADS), {}),
    "tensors of another class": lambda q, k, v: ((Quantized(q), k, v, HEADS), {}),
    "no tensors": lambda q, k, v: ((q, None, v, HEADS), {}),
    "a mask that is none": lambda q, k, v: ((q, k, v, HEADS), {"mask": "causal"}),
    "heads that are no number": lambda q, k, v: ((q, k, v, (HEADS, 1)), {}),
    "no heads": lambda q, k, v: ((q, k, v), {}),
    "further arguments": lambda q, k, v: ((q, k, v, HEADS, None, None, False, False, "new"), {}),
    "an argument twice": lambda q, k, v: ((q, k, v, HEADS), {"heads": HEADS}),
    "other names": lambda q, k, v: ((), {"query": q, "key": k, "value": v, "heads": HEADS}),
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_a_call_that_nobody_knows_goes_on_as_it_came(ran, make, qkv):
    received = []

    def func(*args, **kwargs):
        received.append((args, kwargs))
        return "theirs"

    made = [make(*qkv) for _ in range(len(LEVELS) * BLOCKS)]
    coming = iter(made)

    def call(options, *_):
        args, kwargs = next(coming)
        kwargs |= {"transformer_options": options}
        return options[KEY](func, *args, **kwargs)

    got = ran(call)
    assert got.given == [["theirs"] * BLOCKS] * 3
    assert got.counts.reasons == {UNKNOWN: 3 * BLOCKS}
    for (args, kwargs), (given, named) in zip(received, made, strict=True):
        assert (
            all(x is y for x, y in zip(args, given, strict=True)) and kwargs.keys() == named.keys()
        )

# SPDX-License-Identifier: Apache-2.0
"""What passes for a plain backend, and what for one that changes attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as exact

from tests.fuzz.data import Sizes, draw_values
from tests.nodes.parts import relative_error

HEADS, TOKENS, HEAD_DIM = 4, 500, 64
DATA = {
    "noise": "noise",
    "drift": "smooth",
    "clusters": "clusters",
    "outlier channels": "outliers",
    "mean values": "noise",
    "long rows": "steep",
}


@pytest.fixture(params=DATA)
def qkv(request, generator):
    sizes = Sizes(2, HEADS, HEADS, TOKENS, TOKENS, HEAD_DIM)
    values = draw_values(DATA[request.param], sizes, generator)
    if request.param == "mean values":
        values["v"] += 2 * torch.randn(1, HEADS, 1, HEAD_DIM, generator=generator)
    return values["q"], values["k"], values["v"]


@pytest.fixture(scope="module")
def excess(load_pack):
    """excess(q, k, v, out, ...): above 1 where no plain backend gives out."""
    module, call = load_pack("nodes.override_check"), load_pack("sparge.session").Call

    def of(q, k, v, out, mask=None, scale=None, approximates=False):
        rows = module.PlainRows.of(call(q, k, v, scale, mask=mask, key_mask=mask))
        return float(rows.excess(out, approximates))

    return of


def blocks(x, size, round_block):
    return torch.cat([round_block(block) for block in x.split(size, 2)], 2)


def int8(block):
    scale = block.abs().amax((-2, -1), keepdim=True).clamp_min(1e-20) / 127
    return (block / scale).round() * scale


def e4m3(x, scale):
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def sage(q, k, v, smooth=True, values=True):
    """SageAttention's arithmetic: int8 by blocks, and values and weights in e4m3 or in float16."""
    keys = k - k.mean(2, keepdim=True) if smooth else k
    scores = blocks(q, 128, int8) @ blocks(keys, 64, int8).mT * q.shape[-1] ** -0.5
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    if not values:
        return weights.half().float() @ v.half().float() / total
    return e4m3(weights, 1 / 448) @ e4m3(v, v.abs().amax(2, keepdim=True) / 448) / total


def in_dtype(dtype):
    return lambda q, k, v: exact(*(x.to(dtype) for x in (q, k, v))).float()


def scores_in_bfloat16(q, k, v):
    """ComfyUI's split attention."""
    q, k, v = (x.bfloat16() for x in (q, k, v))
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).float()


PLAIN = {
    "exact": exact,
    "float16": in_dtype(torch.float16),
    "bfloat16": in_dtype(torch.bfloat16),
    "scores in bfloat16": scores_in_bfloat16,
    "int8 and e4m3": sage,
    "int8 and float16": lambda q, k, v: sage(q, k, v, values=False),
}


@pytest.mark.parametrize("backend", PLAIN.values(), ids=PLAIN)
def test_plain(excess, qkv, backend):
    assert excess(*qkv, backend(*qkv)) < 0.9


def temperature(by, backend=exact):
    return lambda q, k, v: backend(q * by, k, v)


def gain(by, backend=exact):
    return lambda q, k, v: backend(q, k, v) * by


def in_part(changed, place):
    def found(q, k, v):
        out = exact(q, k, v)
        out[place] = changed(q, k, v)[place]
        return out

    return found


def with_further_keys(q, k, v):
    return exact(q, torch.cat([k, k.roll(1, 1)], 2), torch.cat([v, 1.5 * v.roll(1, 1)], 2))


def biased(first, last, queries, by):
    def found(q, k, v):
        bias = torch.zeros(TOKENS, TOKENS)
        bias[:queries, first:last] = by
        return exact(q, k, v, bias)

    return found


HEAD, ENTRY = (slice(None), 1), (1,)
CHANGED = {
    "gain 0.95": gain(0.95),
    "gain 1.05": gain(1.05),
    "gain 1.05 on int8": gain(1.05, sage),
    "temperature 0.8": temperature(0.8),
    "temperature 1.25": temperature(1.25),
    "temperature 2": temperature(2.0),
    "temperature 2 on int8": temperature(2.0, sage),
    "further keys": with_further_keys,
    "bias to text": biased(0, 77, TOKENS, 2.0),
    "a region apart": biased(TOKENS // 2, TOKENS, TOKENS // 4, -math.inf),
    "a gain of one head": in_part(gain(1.1), HEAD),
    "a temperature of one head": in_part(temperature(2.0), HEAD),
    "a gain of one prompt": in_part(gain(1.05), ENTRY),
    "a temperature of one prompt": in_part(temperature(1.5), ENTRY),
    "NaN": gain(math.nan),
}


@pytest.mark.parametrize("override", CHANGED.values(), ids=CHANGED)
def test_changed(excess, qkv, override):
    """What is not found is as small as the error of 8 bits: a weak temperature, of values that are
    nearly all alike."""
    out = override(*qkv)
    assert excess(*qkv, out) > 1 or relative_error(out, exact(*qkv)) < 0.01


def test_an_approximation_has_wider_limits(excess, make_qkv):
    """Such as block-sparse attention with a pooled key for what it drops."""
    q, k, v = (0.5 * x for x in make_qkv(1, 2, 1024, 64, dtype=torch.float32))
    bias = torch.cat([torch.zeros(256), torch.full((12,), math.log(64))])
    keys, values = (
        torch.cat([x[:, :, :256], x[:, :, 256:].unflatten(2, (-1, 64)).mean(3)], 2) for x in (k, v)
    )
    out = exact(q, keys, values, bias.expand(1024, -1))
    assert excess(q, k, v, out) > 1 > excess(q, k, v, out, approximates=True)
    changed = 1.3 * out
    assert excess(q, k, v, changed, approximates=True) > 1


def test_masks_scales_shared_keys_and_parts(excess, load_pack, monkeypatch, make_qkv):
    q, k, v = make_qkv(2, 6, 300, 64, kv_heads=3, dtype=torch.float32)
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, 200:], mask[1, 150:] = False, False
    expected = exact(q, k, v, mask.view(2, 1, 1, 300), scale=0.3, enable_gqa=True)
    additive = torch.zeros(2, 1, 1, 300).masked_fill(~mask.view(2, 1, 1, 300), -math.inf)
    monkeypatch.setattr(load_pack("nodes.override_check"), "_PART", 1)  # one head at a time
    for given in (mask, additive, mask.view(2, 1, 300)):
        assert excess(q, k, v, expected, given, 0.3) < 1e-3
    assert excess(q, k, v, expected, None, 0.3) > 1 < excess(q, k, v, expected, mask)


def test_what_the_model_gives_is_no_change(excess, make_qkv):
    """Its own NaN, values that are all zero, and fewer tokens than rows that are compared."""
    q, k, v = make_qkv(1, 2, 20, 64, dtype=torch.float32)
    q[:, 0, 3] = math.nan
    v[:, 1] = 0
    assert excess(q, k, v, exact(q, k, v)) < 1e-3
    assert excess(q, k, v, exact(q, k, v) + 0.1) > 1


def test_layers_in_turn_compare_every_head(load_pack, generator):
    """A change of one head of 24, of which two share keys, is found in one layer of a few."""
    module, call = load_pack("nodes.override_check"), load_pack("sparge.session").Call
    q, k, v = (torch.randn(1, heads, 300, 64, generator=generator) for heads in (24, 12, 12))
    out = exact(q, k, v, enable_gqa=True)
    changed = out.clone()
    changed[:, 17] *= 1.2
    seen = []
    for layer in range(4):
        rows = module.PlainRows.of(call(q, k, v), first_head=layer)
        assert rows.excess(out, False) < 1
        seen.append(float(rows.excess(changed, False)) > 1)
        assert seen[-1] == (17 in rows.heads)
    assert any(seen) and not all(seen)

# SPDX-License-Identifier: Apache-2.0
"""What passes for a plain backend, and what for one that changes attention."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as exact

from tests.comfy.overrides import BACKENDS, MEANINGS, e4m3, gain, int8, temperature
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


def called(override, q, k, v):
    """Result of an override on the model's exact attention."""

    def attend(q, k, v, heads, mask=None, **_):
        return exact(q, k, v, mask)

    options = {"skip_reshape": True, "transformer_options": {"cond_or_uncond": [0, 1]}}
    return override(attend, q.clone(), k, v, HEADS, **options)


def sage(attend, q, k, v, *_, **__):
    """SageAttention's arithmetic: int8 by blocks, and values and weights in e4m3."""
    scores = int8(q, 2) @ int8(k - k.mean(2, keepdim=True), 2).mT * q.shape[-1] ** -0.5
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    rounded = (448 * weights).to(torch.float8_e4m3fn).float() / 448
    return rounded @ e4m3(v, 2) / total


def scores_in_bfloat16(attend, q, k, v, *_, **__):
    """ComfyUI's split attention."""
    q, k, v = (x.bfloat16() for x in (q, k, v))
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).float()


PLAIN = BACKENDS | {"sage": sage, "scores in bfloat16": scores_in_bfloat16}


@pytest.mark.parametrize("backend", PLAIN.values(), ids=PLAIN)
def test_plain(excess, qkv, backend):
    assert excess(*qkv, called(backend, *qkv)) < 0.9


CHANGED = MEANINGS | {
    "a little warmer": partial(temperature, by=0.8),
    "a little colder": partial(temperature, by=1.25),
    "a little less": partial(gain, by=0.95),
    "a gain on 8 bits": lambda attend, *args, **kwargs: gain(
        partial(sage, attend), *args, **kwargs
    ),
    "NaN": partial(gain, by=math.nan),
}


@pytest.mark.parametrize("meaning", CHANGED.values(), ids=CHANGED)
def test_changed(excess, qkv, meaning):
    """What is not found is as small as the error of 8 bits: a weak temperature, of values that are
    nearly all alike."""
    out = called(meaning, *qkv)
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
    by_query = mask[:, None] & mask[:, :, None]  # those of padding see nothing, so are not compared
    for given in (mask[:, None], additive, by_query):
        assert excess(q, k, v, expected, given, 0.3) < 1e-3
    for given, scale in ((None, 0.3), (mask[:, None], None), (by_query, None)):
        assert excess(q, k, v, expected, given, scale) > 1


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

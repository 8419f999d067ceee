# SPDX-License-Identifier: Apache-2.0
"""Padding masks beside torch's own attention with them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparge
from benchmarks.metrics import rel_l2
from sparge import Precision, SparsePolicy, TokenGrid, grid_order, key_padding
from sparge.weak_cache import WeakTensorCache

attention: Any = sparge.attention
DENSE = SparsePolicy(topk=1.0, precision=Precision.SIXTEEN_BIT)
TOKENS = 200
PLACES = torch.arange(TOKENS)
#: Which keys are real: (2, TOKENS) bool.
REAL = {
    "all": torch.stack([PLACES >= 0, PLACES >= 0]),
    "behind": torch.stack([PLACES < 170, PLACES < 64]),
    "in front": torch.stack([PLACES >= 30, PLACES >= 0]),
    "text first": torch.stack([(PLACES < 12) | (PLACES >= 50), PLACES > 3]),
    "holes": torch.stack([PLACES % 3 > 0, PLACES % 7 == 0]),
    "one key": torch.stack([PLACES == 199, PLACES == 0]),
}
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "(B, N)": lambda real: real,
    "(1, N)": lambda real: real[:1],
    "(B, 1, 1, N)": lambda real: real[:, None, None],
    "(B, H, 1, N)": lambda real: real[:, None, None].repeat(1, 4, 1, 1),
    "(B, 1, Nq, N)": lambda real: real[:, None, None].repeat(1, 1, 90, 1),
    "expanded": lambda real: real[:, None, None].expand(-1, 4, 90, -1),
}


def added(mask: Tensor, hidden: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


def truth(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=real[:, None, None], enable_gqa=True
    )


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*((kind, "(B, N)") for kind in REAL), *(("text first", shape) for shape in SHAPES)],
)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_attention_is_that_with_the_mask(make_qkv, kind: str, shape: str, layout: str) -> None:
    q, k, v = make_qkv(2, 4, 90, 64, kv_heads=2, kv_tokens=TOKENS)
    real = REAL[kind]
    mask = SHAPES[shape](real)
    if shape == "(1, N)":
        real = real[:1].expand(2, -1)
    expected = truth(q, k, v, real)
    k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (k, v))  # never read
    q, k, v = (x if layout == "HND" else x.transpose(1, 2) for x in (q, k, v))
    for each in (mask, added(mask, -torch.inf, torch.bfloat16)):
        found = key_padding(each)
        assert (found.key_lengths is None) == (kind == "all")
        keys, values, lengths = found.apply(k, v, layout)
        assert (keys is k and values is v) == (kind in ("all", "behind")), "copied for holes alone"
        out = attention(q, keys, values, DENSE, key_lengths=lengths, layout=layout)
        assert rel_l2(out if layout == "HND" else out.transpose(1, 2), expected) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_hide_a_key(dtype: torch.dtype) -> None:
    expected = key_padding(REAL["text first"])
    assert expected.key_lengths is not None and expected.index is not None
    for hidden in (-torch.inf, torch.finfo(dtype).min, torch.finfo(torch.float16).min, -1e4):
        found = key_padding(added(REAL["text first"], hidden, dtype))
        assert found.key_lengths is not None and found.index is not None
        assert torch.equal(found.key_lengths, expected.key_lengths)
        assert torch.equal(found.index, expected.index)


@pytest.mark.parametrize("kind", ["behind", "holes"])
def test_an_entry_without_a_real_key_is_zero(make_qkv, kind: str) -> None:
    """But finite values everywhere are weighed by dense attention: it gives the mean of the
    padding's values, which no key length says."""
    q, k, v = make_qkv(2, 2, 90, 64, kv_tokens=TOKENS)
    real = REAL[kind].clone()
    for first_is_real in (True, False):
        real[1], real[0] = False, real[0] & first_is_real
        for mask in (real, added(real, -torch.inf)):
            keys, values, lengths = key_padding(mask).apply(k, v)
            out, lse = attention(q, keys, values, DENSE, key_lengths=lengths, return_lse=True)
            assert not out[1].any() and (lse[1] == -torch.inf).all()
            if first_is_real:
                assert rel_l2(out[:1], truth(q, k, v, real)[:1]) < 0.01
            assert first_is_real or not out.any()
    with pytest.raises(sparge.Unsupported, match="no real key, and its values are finite"):
        key_padding(added(real, torch.finfo(torch.float32).min))


@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize(
    "named",
    [{"is_causal": True}, {"causal": "top-left"}, {"order": grid_order(TokenGrid(1, 10, 20))}],
)
def test_causal_calls_and_orders_take_keys_where_they_are(make_qkv, kind: str, named: Any) -> None:
    q, k, v = make_qkv(2, 2, TOKENS, 64)
    real = REAL[kind]
    keys, values, lengths = key_padding(real).apply(k, v)
    if keys is not k:
        assert lengths is not None
        with pytest.raises(sparge.Unsupported, match=r"moved to the front .* pad at the end"):
            attention(q, keys, values, key_lengths=lengths.clone(), **named)
    elif "order" not in named:
        mask = real[:, None, None] & (PLACES[:, None] >= PLACES)
        out = attention(q, k, v, DENSE, key_lengths=lengths, **named)
        assert rel_l2(out, scaled_dot_product_attention(q, k, v, attn_mask=mask)) < 0.01


def test_facts_are_remembered_of_tensors_whose_changes_show() -> None:
    """Neither NumPy nor inference mode writes there unseen."""
    cache: WeakTensorCache[Tensor] = WeakTensorCache()
    tensors = [torch.zeros(4, device="meta") for _ in range(3)]
    found = [cache.add(tensor, torch.ones(1)) for tensor in tensors]
    assert all(cache.get(tensor) is x for tensor, x in zip(tensors, found, strict=True))
    tensors[1].zero_()
    tensors[2].data = torch.zeros(5, device="meta")
    assert [cache.get(tensor) is x for tensor, x in zip(tensors, found, strict=True)] == [
        True, False, False,
    ]  # fmt: skip
    with torch.inference_mode():
        unseen = [torch.zeros(4), torch.zeros(4, device="meta")]
    for tensor in (*unseen, torch.zeros(4)):
        assert cache.add(tensor, found[0]) is found[0] and cache.get(tensor) is None
    held = [weakref.ref(x) for x in found]
    del tensors, tensor, unseen, found
    gc.collect()
    assert [x() for x in held] == [None] * 3, "what is remembered ends with the tensor"


DIAGONAL = torch.ones(8, 8, dtype=torch.bool).tril()
HEADS_DIFFER = torch.arange(4).view(1, 4, 1, 1).expand(1, 4, 1, TOKENS) == 0


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (DIAGONAL[None, None], "hides other keys from some"),
        ((REAL["holes"][:, None] & REAL["behind"][:, :, None])[:, None], "hides other keys from"),
        ((REAL["one key"][:, None] | REAL["one key"][:, :, None])[:, None], "hides other keys"),
        (HEADS_DIFFER, "hides other keys from some"),
        (added(DIAGONAL, -torch.inf).expand(2, 1, 8, 8), "hides other keys from some"),
        *(
            (torch.zeros(2, TOKENS).index_fill(1, torch.tensor([7]), value), "weighs keys")
            for value in (-3.0, 1.0, -9999.0, torch.nan, torch.inf)
        ),
        ([True, False], "mask is a list; give a torch tensor"),
        (torch.ones(2, 8, dtype=torch.int64), "mask is torch.int64; give bool"),
        (torch.ones(8, dtype=torch.bool), r"mask has shape \(8,\)"),
        (torch.ones(2, 3, 8, dtype=torch.bool), r"mask has shape \(2, 3, 8\)"),
        (torch.ones(2, 0, dtype=torch.bool), r"mask has shape \(2, 0\)"),
    ],
)
def test_a_mask_that_is_more_than_padding_or_none(mask: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        key_padding(mask)


@pytest.mark.parametrize("kind", ["all", "behind", "holes"])
def test_keys_of_another_call_are_refused(make_qkv, kind: str) -> None:
    _, k, v = make_qkv(2, 2, 90, 64, kv_tokens=TOKENS)
    found = key_padding(REAL[kind])
    for keys, values in ((k[:, :, :50], v[:, :, :50]), (k, v[:, :, :50]), (k[:, :, :50], v)):
        with pytest.raises(ValueError, match="mask is of 200 keys"):
            found.apply(keys, values)
    if kind != "all":
        with pytest.raises(ValueError, match="mask is of 200 keys of 2"):
            found.apply(*(x.repeat(2, 1, 1, 1) for x in (k, v)))
        with pytest.raises(ValueError, match="The mask is on cpu; put it on meta"):
            found.apply(k.to("meta"), v.to("meta"))

# SPDX-License-Identifier: Apache-2.0
"""Padding masks beside torch's own attention with them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge import Precision, SparsePolicy, key_padding, padding
from sparge.common.metrics import rel_l2
from sparge.common.weak_cache import WeakTensorCache

attention: Any = sparge.attention
DENSE = SparsePolicy(topk=1.0, precision=Precision.SIXTEEN_BIT)
TOKENS = 200
LIMITS = [-torch.inf, torch.finfo(torch.float32).min, torch.finfo(torch.float16).min, -1e4]


def real_keys(kind: str) -> Tensor:
    """(2, TOKENS) bool."""
    places = torch.arange(TOKENS)
    return {
        "all": torch.stack([places >= 0, places >= 0]),
        "behind": torch.stack([places < 170, places < 64]),
        "in front": torch.stack([places >= 30, places >= 0]),
        "text first": torch.stack(
            [(places < 12) | (places >= 50), (places < 50) & (places > 3) | (places >= 50)]
        ),
        "holes": torch.stack([places % 3 > 0, places % 7 == 0]),
        "one key": torch.stack([places == 199, places == 0]),
    }[kind]


KINDS = ["all", "behind", "in front", "text first", "holes", "one key"]
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "(1, N)": lambda real: real[:1],
    "(B, N)": lambda real: real,
    "(B, 1, 1, N)": lambda real: real[:, None, None],
    "(B, H, 1, N)": lambda real: real[:, None, None].repeat(1, 4, 1, 1),
    "(B, 1, Nq, N)": lambda real: real[:, None, None].repeat(1, 1, 90, 1),
    "expanded": lambda real: real[:, None, None].expand(-1, 4, 90, -1),
}


def added(mask: Tensor, hidden: float, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


def truth(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    return scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=real[:, None, None], enable_gqa=True
    )


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*((kind, "(B, N)") for kind in KINDS), *(("text first", shape) for shape in SHAPES)],
)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_attention_is_that_with_the_mask(make_qkv, kind: str, shape: str, layout: str) -> None:
    q, k, v = make_qkv(2, 4, 90, 64, kv_heads=2, kv_tokens=TOKENS)
    real = real_keys(kind)
    mask = SHAPES[shape](real)
    if shape == "(1, N)":
        real = real[:1].expand(2, -1)
    expected = truth(q, k, v, real)
    k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (k, v))  # never read
    q, k, v = (x if layout == "HND" else x.transpose(1, 2) for x in (q, k, v))
    behind = bool((real.cummin(1).values == real).all())
    for each in (mask, added(mask, -torch.inf, torch.bfloat16)):
        found = key_padding(each)
        assert (found.key_lengths is None) == bool(real.all())
        assert (found.index is None) == behind
        keys, values, lengths = found.apply(k, v, layout)
        assert not behind or (keys is k and values is v)
        out = attention(q, keys, values, DENSE, key_lengths=lengths, layout=layout)
        assert rel_l2(out if layout == "HND" else out.transpose(1, 2), expected) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_hide_a_key(dtype: torch.dtype) -> None:
    real = real_keys("text first")
    for hidden in LIMITS:
        found = key_padding(added(real, max(hidden, torch.finfo(dtype).min), dtype))
        assert found.key_lengths is not None and found.index is not None
        assert found.key_lengths.tolist() == real.sum(1).tolist()
        for entry, length in enumerate(found.key_lengths.tolist()):
            assert torch.equal(found.index[entry, :length], real[entry].nonzero().squeeze(1))


def test_an_entry_without_a_real_key_is_zero(make_qkv) -> None:
    q, k, v = make_qkv(2, 2, 90, 64, kv_tokens=TOKENS)
    for kind in ("behind", "holes"):
        real = real_keys(kind)
        real[1] = False
        for mask in (real, added(real, -torch.inf, torch.float32)):
            keys, values, lengths = key_padding(mask).apply(k, v)
            out, lse = attention(q, keys, values, DENSE, key_lengths=lengths, return_lse=True)
            assert rel_l2(out[:1], truth(q, k, v, real)[:1]) < 0.01
            assert not out[1].any() and (lse[1] == -torch.inf).all()
    for only in (torch.zeros(2, TOKENS, dtype=torch.bool), real & False):
        keys, values, lengths = key_padding(only).apply(k, v)
        assert not attention(q, keys, values, DENSE, key_lengths=lengths).any()


def test_finite_values_everywhere_are_weighed_by_dense_attention() -> None:
    """It gives the mean of the padding's values, which no key length says."""
    real = real_keys("behind")
    real[1] = False
    with pytest.raises(sparge.Unsupported, match="no real key, and its values are finite"):
        key_padding(added(real, torch.finfo(torch.float32).min, torch.float32))


class TestWaits:
    @pytest.fixture
    def reads(self, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
        """Masks that were looked at: each time waits for their device."""
        found: list[Tensor] = []
        read = padding._read
        monkeypatch.setattr(padding, "_read", lambda mask: (found.append(mask), read(mask))[1])
        monkeypatch.setattr(padding, "_paddings", WeakTensorCache(3))
        return found

    @pytest.mark.parametrize("inference", [False, True])
    def test_once_a_mask_and_again_after_a_change(self, reads: list[Tensor], inference: bool):
        with torch.inference_mode(inference):
            mask, weighing = real_keys("behind"), torch.full((1, TOKENS), 0.5)
            assert key_padding(mask) is key_padding(mask)
            key_padding(mask.clone())
            assert len(reads) == 2
            for _ in range(3):
                with pytest.raises(sparge.Unsupported, match="it weighs keys"):
                    key_padding(weighing)
            assert len(reads) == 3
        if not inference:
            mask[:, 0] = False
            assert key_padding(mask).index is not None and len(reads) == 4

    def test_what_is_remembered_ends_with_the_mask(self, reads: list[Tensor]) -> None:
        masks = [real_keys(kind) for kind in KINDS[:5]]
        for mask in masks:
            key_padding(mask)
        assert len(padding._paddings) == 3, "no more than it may hold"
        key_padding(masks[-1])
        assert len(reads) == 5
        key_padding(masks[0])
        assert len(reads) == 6, "the oldest was forgotten"
        reads.clear()
        del masks, mask
        gc.collect()
        assert len(padding._paddings) == 0


class TestRefusals:
    @pytest.mark.parametrize(
        "mask",
        [
            torch.ones(8, 8, dtype=torch.bool).tril()[None, None],
            torch.arange(4).view(1, 4, 1, 1).expand(1, 4, 1, TOKENS) == 0,
            torch.zeros(2, 1, 8, 8).masked_fill(~torch.ones(8, 8).tril().bool(), -torch.inf),
        ],
    )
    def test_rows_that_differ(self, mask: Tensor) -> None:
        with pytest.raises(sparge.Unsupported, match="hides other keys from some"):
            key_padding(mask)

    @pytest.mark.parametrize("value", [-3.0, 1.0, -9999.0, torch.nan, torch.inf])
    def test_values_that_weigh(self, value: float) -> None:
        mask = torch.zeros(2, TOKENS)
        mask[1, 7] = value
        with pytest.raises(sparge.Unsupported, match="weighs keys"):
            key_padding(mask)

    @pytest.mark.parametrize(
        ("mask", "words"),
        [
            ([True, False], "mask is a list; give a torch tensor"),
            (torch.ones(2, 8, dtype=torch.int64), "mask is torch.int64; give bool"),
            (torch.ones(8, dtype=torch.bool), r"mask has shape \(8,\)"),
            (torch.ones(2, 3, 8, dtype=torch.bool), r"mask has shape \(2, 3, 8\)"),
            (torch.ones(2, 0, dtype=torch.bool), r"mask has shape \(2, 0\)"),
        ],
    )
    def test_what_is_no_mask(self, mask: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            key_padding(mask)

    @pytest.mark.parametrize("kind", ["all", "behind", "holes"])
    def test_keys_of_another_call(self, make_qkv, kind: str) -> None:
        _, k, v = make_qkv(2, 2, 90, 64, kv_tokens=TOKENS)
        found = key_padding(real_keys(kind))
        for keys, values in ((k[:, :, :50], v[:, :, :50]), (k, v[:, :, :50]), (k[:, :, :50], v)):
            with pytest.raises(ValueError, match="mask is of 200 keys"):
                found.apply(keys, values)
        if kind != "all":
            with pytest.raises(ValueError, match="mask is of 200 keys of 2"):
                found.apply(*(x.repeat(2, 1, 1, 1) for x in (k, v)))
            with pytest.raises(ValueError, match="The mask is on cpu; put it on meta"):
                found.apply(k.to("meta"), v.to("meta"))

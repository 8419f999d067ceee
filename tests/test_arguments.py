# SPDX-License-Identifier: Apache-2.0
"""Arguments that cannot be served get a sentence before anything runs, whatever the parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import sparge
from sparge import (
    AttentionStats,
    HeadSettings,
    Precision,
    SparsePolicy,
    TokenGrid,
    Unsupported,
    grid_order,
)
from sparge.stages import on_reference

attention: Any = sparge.attention
SPARSE = SparsePolicy(topk=0.4)
SQUARE = grid_order(TokenGrid(1, 16, 16))
HALF = HeadSettings.uniform(2, 0.5)
SCALED = replace(HALF, output_scale=torch.ones(2))
SIXTEEN_BIT = SparsePolicy(precision=Precision.SIXTEEN_BIT)
# Of any type, for arguments of the wrong one.
policy_of: Any = SparsePolicy


def uniform(heads: Any = 2, density: Any = 0.5, *others: Any, **named: Any) -> HeadSettings:
    return HeadSettings.uniform(heads, density, *others, **named)


def changed(**named: Any) -> HeadSettings:
    return replace(uniform(), **named)


FLAGS = ("attention_sink", "keep_diagonal", "smooth_k")
NUMBERS = ("topk", "cdfthreshd", "simthreshd1", "pvthreshd")
TENSORS = ("density", "pool_weight", "router", "output_scale", "order_kind")

#: Arguments of a call of (1, 2, 256, 64) -> what is said.
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    *(({x: [1.0]}, f"{x} is a list; give a torch tensor") for x in ("q", "k", "key_lengths")),
    ({"policy": 0.5}, "policy is 0.5; give a SparsePolicy"),
    ({"layout": None}, "layout is None; it takes 'HND'"),
    ({"is_causal": torch.ones(3)}, "is_causal is a torch.Tensor; it takes True or False"),
    ({"causal": "bottom_right"}, "causal is .*; it takes 'top-left'"),
    ({"scale": torch.tensor(0.1)}, "scale is a torch.Tensor; give a number"),
    ({"scale": True}, "scale is True; give a number"),
    *(({"scale": x}, "a finite number") for x in (-1.0, 0.0, 2.0**-21, math.inf, math.nan)),
    ({"key_lengths": torch.tensor([5])}, "int32"),
    ({"key_lengths": torch.tensor([5, 5], dtype=torch.int32)}, "int32 of shape"),
    ({"block_mask": np.ones((1, 2, 2, 4))}, "block_mask is a numpy.ndarray; give a torch"),
    ({"block_mask": torch.ones(1, 2, 4, 2)}, r"\(1, 2, 2, 4\)"),
    *(({"block_mask": torch.ones(1, 2, 2, 4, dtype=x)}, f"block_mask is {x}; give bool or integers")
      for x in (torch.float32, torch.bfloat16, torch.complex64)),
    ({"policy": SparsePolicy(topk=torch.ones(5))}, r"topk has shape \(5,\).* 2 query heads"),
    ({"out_layout": 1}, "out_layout is 1; it takes 'HND'"),
    ({"return_lse": "no"}, "return_lse is 'no'; it takes True or False"),
    ({"order": TokenGrid(2, 8, 10)}, "order is a .*TokenGrid; give what grid_order makes"),
    ({"order": SQUARE, "is_causal": True}, "do not go together"),
    ({"head_settings": HALF, "block_mask": torch.ones(1, 2, 2, 4).bool()}, "give one or the other"),
    ({"order": SQUARE, "block_mask": torch.ones(1, 2, 1, 4)}, r"slots, with.* \(1, 2, 2, 4\)"),
    *(({"topk": 0.3, name: x}, f"topk and {name} are given") for name, x in (
        ("policy", SPARSE), ("head_settings", HALF), ("block_mask", torch.ones(1, 2, 2, 4)),
    )),
    ({"cu_seqlens": torch.tensor([0, 256])}, "call attention for each"),
    ({"order": grid_order(TokenGrid(1, 8, 8))}, "the token order is one of 64 tokens"),
    ({"head_settings": 0.3}, "head_settings is 0.3; give what HeadSettings"),
    ({"head_settings": SCALED, "is_causal": True}, "later keys.*leave it out"),
    ({"head_settings": SCALED, "policy": SIXTEEN_BIT}, "16-bit operands.*leave it out"),
    *(
        ({"head_settings": HALF, "policy": policy_of(**{name: torch.ones(5)})},
         rf"{name} has shape \(5,\).* 2 query heads")
        for name in ("simthreshd1", "pvthreshd")
    ),
    ({"stats": True}, "stats is True; give an AttentionStats"),
    ({"stats": AttentionStats("meta")}, "count on meta and q is on cpu: give Atten"),
    *(({"output_dtype": x}, f"output_dtype is {x!r}; torch.bfloat16")
      for x in ("float16", torch.float64, torch.float8_e4m3fn)),
]  # fmt: skip


@pytest.mark.parametrize(("named", "words"), ARGUMENTS)
def test_an_argument_that_is_not_served(make_qkv, named: dict, words: str) -> None:
    given = dict(zip("qkv", make_qkv(), strict=True)) | named
    with pytest.raises(ValueError, match=words):
        attention(**given)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda q, k, v: (q[0], k, v), ValueError, r"q has shape \(2, 256, 64\)"),
        (lambda q, k, v: (q.double(), k, v), Unsupported, "bfloat16, float16"),
        (lambda q, k, v: (q, k[..., :32], v), ValueError, "B and D must be equal"),
        (lambda q, k, v: (q, k[:, :, :9], v), ValueError, "they must agree"),
        (lambda q, k, v: (q, k, v[..., :32]), Unsupported, "v has head_dim 32"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), ValueError, "empty|heads"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), ValueError, "empty dimension"),
        (lambda q, k, v: (q.mT.contiguous().mT, k, v), Unsupported, "contiguous"),
        (lambda q, k, v: (q.repeat(1, 1, 1, 3),) * 3, Unsupported, "up to 128"),
        (lambda q, k, v: (q.requires_grad_(), k, v), Unsupported, "no backward"),
        *(
            (lambda *qkv, layout=layout: nested(qkv, layout), Unsupported, "q is nested.* pad nest")
            for layout in (torch.strided, torch.jagged)
        ),
        (lambda q, k, v: (q.to_sparse(), k, v), Unsupported, "q is of layout torch.sparse_coo"),
        (lambda q, k, v: (q, k, v.to_mkldnn()), Unsupported, "v is of layout torch._mkldnn"),
        *(
            (lambda *_, queries=queries, keys=keys: tokens(queries, keys, keys), Unsupported,
             f"{queries} queries and {keys} keys; up to 33554431")
            for queries, keys in ((2**25, 1), (1, 2**25), (2**31, 1), (1, 2**33))
        ),
    ],
)  # fmt: skip
def test_tensors_that_are_not_served(make_qkv, change: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        attention(*change(*make_qkv()))


def nested(qkv: Any, layout: torch.layout) -> list[torch.Tensor]:
    """Two sequences, (batch, heads, tokens, head_dim) as torch's own attention takes them."""
    parts = ([x[0].transpose(0, 1), x[0, :, :99].transpose(0, 1)] for x in qkv)
    return [torch.nested.nested_tensor(each, layout=layout).transpose(1, 2) for each in parts]


def tokens(*counts: int) -> tuple[torch.Tensor, ...]:
    """One head of so many tokens each, in the memory of one token."""
    return tuple(torch.zeros(1, 1, 1, 64).expand(1, 1, n, 64) for n in counts)


@pytest.mark.parametrize(
    ("make", "named", "words"),
    [
        (policy_of, {"precision": "int8"}, "precision is 'int8'; give one of Precision"),
        (policy_of, {"exact_prefix": 1.5}, "exact_prefix is 1.5; it takes a whole number"),
        (policy_of, {"exact_suffix": True}, "exact_suffix is True; it takes a whole number"),
        (policy_of, {"exact_prefix": -1}, "exact_prefix is -1; it takes a whole number"),
        *((policy_of, {x: 0}, f"{x} is 0; it takes True or False") for x in FLAGS),
        (policy_of, {"select_by": "topp"}, "'topk'.*'cdf'"),
        (policy_of, {"select_by": torch.ones(2)}, "select_by is a torch.Tensor; it takes 'topk'"),
        *((policy_of, {x: [0.1]}, f"{x} is a list; give a number, or a float te") for x in NUMBERS),
        (policy_of, {"topk": 1.5}, "topk is 1.5.*0 to 1"),
        (policy_of, {"topk": torch.tensor([1, 0])}, "floating point"),
        (policy_of, {"pvthreshd": -1.0}, "pvthreshd"),
        (policy_of, {"simthreshd1": math.nan}, "simthreshd1 is nan; it takes a number"),
        *((changed, {x: 0.5}, f"{x} is 0.5; give a torch tensor") for x in TENSORS),
        (changed, {"output_scale": torch.ones(3)}, r"output_scale has shape \(3,\)"),
        (changed, {"density": torch.zeros(2, 1)}, r"density has shape \(2, 1\)"),
        (changed, {"density": torch.zeros(2).double()}, "density has .* give one torch.float32"),
        (changed, {"router": torch.zeros(2)}, "router has .* torch.float32; give one torch.int32"),
        (changed, {"order_kind": torch.zeros(2, device="meta").int()},
         "order_kind is on meta and density on cpu: put all values"),
        (changed, {"pools": "no"}, "pools is 'no'; it takes True or False"),
        (uniform, {"heads": 2.0}, "heads is 2.0; it takes a whole number from 1"),
        (uniform, {"density": "half"}, "density is 'half'; give a number"),
        (uniform, {"density": 1.5}, "density is 1.5 and pool_weight 0.0; density"),
        (uniform, {"pool_weight": -1.0}, "density is 0.5 and pool_weight -1.0"),
        (uniform, {"router": "error"}, "router is 'error'; it takes Router"),
    ],
)  # fmt: skip
def test_policies_and_head_settings_that_are_none(make: Any, named: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**named)


def test_numpys_numbers_are_numbers(make_qkv) -> None:
    q, k, v = make_qkv()
    policy = policy_of(topk=np.float32(0.5), exact_prefix=np.int64(70), attention_sink=np.True_)
    same = SparsePolicy(topk=0.5, exact_prefix=70, attention_sink=True)
    assert policy == same and type(policy.exact_prefix) is int and type(policy.topk) is float
    given = {"scale": np.float32(0.125), "is_causal": np.True_}
    expected = attention(q, k, v, same, scale=0.125, is_causal=True)
    assert torch.equal(attention(q, k, v, policy, **given), expected)
    assert uniform(np.int64(2), np.float32(0.5)).heads == 2


def test_calls_that_raise_do_not_count(make_qkv, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv()
    stats = AttentionStats("cpu")
    with pytest.raises(ValueError, match="out_layout"):
        attention(q, k, v, stats=stats, out_layout="BHND")
    with pytest.raises(ValueError, match="key_lengths go down to 100"):
        lengths = torch.tensor([100], dtype=torch.int32)
        attention(q, k, v, stats=stats, order=SQUARE, key_lengths=lengths)
    assert (stats.sparse_calls, stats.blocks_kept, stats.density) == (0, 0, 1.0)

    def refuse(*_: Any) -> None:
        raise Unsupported("too long")

    with monkeypatch.context() as patch, pytest.raises(Unsupported, match="too long"):
        patch.setattr(on_reference, "attend", refuse)
        attention(q, k, v, stats=stats)
    assert stats.sparse_calls == 0
    attention(q, k, v, stats=stats)
    assert stats.sparse_calls == 1

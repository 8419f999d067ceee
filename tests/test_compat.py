# SPDX-License-Identifier: Apache-2.0
"""Upstream's functions and helpers: the same call, each parameter honoured or refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from benchmarks.metrics import rel_l2
from sparge import AttentionStats, SparsePolicy, compat
from sparge.compat.core import read_block_mask
from sparge.compat.utils import get_block_map_meansim, get_block_map_meansim_fuse_quant

library: Any = sparge.attention
by_topk: Any = compat.spas_sage2_attn_meansim_topk_cuda
by_mass: Any = compat.spas_sage2_attn_meansim_cuda
block_sparse: Any = compat.block_sparse_sage2_attn_cuda

# Parameters and defaults in order, from upstream's README and core.py; upstream's default of
# output_dtype, torch.float16, never had an effect, and return_lse is in a branch of theirs.
HEAD = {"dropout_p": 0.0, "scale": None, "smooth_k": True}
MEANSIM = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "smooth_k": True}
TAIL = {
    "pvthreshd": 50, "attention_sink": False, "tensor_layout": "HND", "output_dtype": None,
    "return_sparsity": False, "return_lse": False,
}  # fmt: skip
SIGNATURES = [
    (by_topk, {**MEANSIM, "simthreshd1": -0.1, "cdfthreshd": None, "topk": 0.5, **TAIL}),
    (by_mass, {**MEANSIM, "simthreshd1": 0.6, "cdfthreshd": 0.98, **TAIL}),
    (block_sparse, {"mask_id": None, **HEAD, **TAIL}),
]
#: Thresholds of block maps, for blocks that have something in common; the last key block is ragged.
BY_HEAD = {
    "simthreshd1": torch.tensor([-0.1, 0.02, 0.03, 0.5]),
    "cdfthreshd": torch.tensor([0.2, 0.5, 0.9, 1.0]),
    "attention_sink": True,
}
CASE = (1, 2, 640, 64)
MASK = torch.arange(2 * 5 * 10).view(1, 2, 5, 10) % 3 == 0
SINK = MASK.clone().index_fill_(-1, torch.tensor([0]), True)
SHARES = torch.tensor([0.2, 1.0])


@pytest.mark.parametrize(("function", "defaults"), SIGNATURES)
def test_signature_is_upstreams(function: Any, defaults: dict[str, Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    assert [p.name for p in parameters[:3]] == ["q", "k", "v"]
    assert all(p.default is inspect.Parameter.empty for p in parameters[:3])
    assert [(p.name, p.default) for p in parameters[3:]] == list(defaults.items())
    assert compat.spas_sage_attn_meansim_topk_cuda is by_topk  # upstream's first generation
    assert compat.spas_sage_attn_meansim_cuda is by_mass


@pytest.mark.parametrize(
    ("function", "given", "policy", "options"),
    [
        (by_topk, {}, {}, {}),
        (by_topk, {"topk": 0.2, "is_causal": True}, {"topk": 0.2}, {"is_causal": True}),
        (by_topk, {"topk": SHARES}, {"topk": SHARES}, {}),
        (by_topk, {"topk": 0.1, "attention_sink": True}, {"topk": 0.1, "attention_sink": True}, {}),
        (by_topk, {"topk": 1.0, "pvthreshd": 0.5}, {"topk": 1.0, "pvthreshd": 0.5}, {}),
        (by_topk, {"smooth_k": False}, {"smooth_k": False}, {}),
        (by_topk, {"scale": 0.5}, {}, {"scale": 0.5}),
        (by_topk, {"output_dtype": torch.float32}, {}, {"output_dtype": torch.float32}),
        (
            by_topk, {"topk": None, "cdfthreshd": 0.5, "simthreshd1": 0.02},
            {"select_by": "cdf", "cdfthreshd": 0.5, "simthreshd1": 0.02}, {},
        ),
        (by_mass, {}, {"select_by": "cdf", "simthreshd1": 0.6, "cdfthreshd": 0.98}, {}),
        (
            by_mass, {"simthreshd1": 0.05, "cdfthreshd": SHARES, "pvthreshd": 0.5, "scale": 0.5},
            {"select_by": "cdf", "simthreshd1": 0.05, "cdfthreshd": SHARES, "pvthreshd": 0.5},
            {"scale": 0.5},
        ),
        (block_sparse, {"mask_id": MASK.float()}, {}, {"block_mask": MASK}),
        (block_sparse, {"mask_id": MASK, "attention_sink": True}, {}, {"block_mask": SINK}),
        (block_sparse, {"mask_id": MASK, "scale": 0.5}, {}, {"block_mask": MASK, "scale": 0.5}),
        (block_sparse, {"mask_id": MASK, "smooth_k": False}, {"smooth_k": False},
         {"block_mask": MASK}),
        (block_sparse, {"mask_id": MASK, "pvthreshd": 0.5}, {"pvthreshd": 0.5},
         {"block_mask": MASK}),
    ],
)  # fmt: skip
def test_is_the_librarys_attention(make_qkv, function: Any, given, policy, options) -> None:
    q, k, v = make_qkv(*CASE)
    k = k + 2  # smoothing shows
    stats = AttentionStats("cpu")
    named = {"topk": 0.5, "simthreshd1": -0.1, "keep_diagonal": False} | policy
    expected = library(q, k, v, SparsePolicy(**named), stats=stats, return_lse=True, **options)
    before = MASK.clone()
    out, sparsity, lse = function(q, k, v, return_sparsity=True, return_lse=True, **given)
    assert all(map(torch.equal, (out, lse), expected)) and out.dtype == expected[0].dtype
    assert isinstance(sparsity, float) and sparsity == pytest.approx(1 - stats.density)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    turned, lse = function(*turned, tensor_layout="NHD", return_lse=True, **given)
    assert torch.equal(turned.transpose(1, 2), out) and torch.equal(lse, expected[1])
    assert torch.equal(MASK, before), "the caller's mask is not changed"


@pytest.mark.parametrize(
    ("function", "named", "words"),
    [
        *((each, {"dropout_p": 0.1}, "no dropout") for each in (by_topk, by_mass)),
        (block_sparse, {"dropout_p": 0.1, "mask_id": torch.ones(1, 2, 2, 4)}, "no dropout"),
        *((each, {"attn_mask": torch.ones(256, 256)}, "no element mask")
          for each in (by_topk, by_mass)),
        (by_topk, {"tensor_layout": "BHND"}, "layout"),
        (by_topk, {"topk": 0.5, "cdfthreshd": 0.9}, "set exactly one"),
        (by_topk, {"topk": None}, "set exactly one"),
        (block_sparse, {}, r"mask_id is None.*\(1, 2, 2, 4\)"),
        (block_sparse, {"mask_id": [1]}, "mask_id is a list; it is a tensor"),
        *((block_sparse, {"mask_id": torch.ones(x)}, r"\(1, 2, 2, 4\).*\(1, 2, 4, 2\).*every GPU")
          for x in ((1, 2, 4, 1), (1, 1, 2, 4), (2, 4))),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(make_qkv, function: Any, named: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        function(*make_qkv(1, 2, 256, 64), **named)


@pytest.mark.parametrize("keys", [300, 900])
def test_causal_is_aligned_at_the_first_key_as_upstreams(make_qkv, keys: int) -> None:
    q, k, v = make_qkv(1, 2, 640, 64, kv_tokens=keys)
    out = by_topk(q, k, v, is_causal=True, topk=1.0)
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert rel_l2(out, truth) < 0.02


def test_a_layout_in_place_of_the_mask_is_read_as_engines_mean_it(make_qkv) -> None:
    """LightX2V calls so; upstream reads nothing there."""
    q, k, v = make_qkv(*CASE)
    for function in (by_topk, by_mass):
        assert torch.equal(function(q, k, v, "HND"), function(q, k, v))
        for given, layout in (("NHD", "HND"), ("HND", "NHD")):
            with pytest.raises(ValueError, match="give tensor_layout by its name"):
                function(q, k, v, given, tensor_layout=layout)
        with pytest.raises(ValueError, match="no dropout"):
            function(q, k, v, "HND", 0.1)


def of_tokens(mask: Tensor, queries: int, keys: int) -> Tensor:
    """The smallest mask of 128 x 64 blocks that keeps every pair which one of 64 x 128 keeps."""
    pairs = mask.repeat_interleave(64, 2).repeat_interleave(128, 3)[:, :, :queries, :keys]
    rows = torch.stack([part.any(2) for part in pairs.split(128, 2)], 2)
    return torch.stack([part.any(3) for part in rows.split(64, 3)], 3)


@pytest.mark.parametrize("queries, keys", [(300, 500), (65, 1), (190, 127), (64, 64)])
def test_a_mask_of_hoppers_64_by_128_blocks_keeps_all_that_it_says(
    make_qkv, generator, queries: int, keys: int
) -> None:
    """Other packages build such where the GPU is an H100."""
    q, k, v = make_qkv(2, 4, queries, 64, kv_heads=2, kv_tokens=keys)
    wide = torch.rand(2, 4, -(-queries // 64), -(-keys // 128), generator=generator) < 0.3
    smallest = of_tokens(wide, queries, keys)
    assert torch.equal(read_block_mask(wide.int(), q, k, "HND"), smallest)
    assert torch.equal(block_sparse(q, k, v, wide), block_sparse(q, k, v, smallest))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {"topk": 0.3, "cdfthreshd": None, "simthreshd1": -0.1},
        {"cdfthreshd": 0.7, "simthreshd1": 0.02},
        BY_HEAD,
    ],
    ids=["topk", "cdf", "by head"],
)
def test_attention_over_a_block_map_is_that_of_its_thresholds(
    make_qkv, given: dict[str, Any], is_causal: bool
) -> None:
    q, k, v = make_qkv(2, 4, 700, 64, kv_heads=2)
    q, k = (x + 0.3 * x[:, :, :1] for x in (q, k))
    given = {"topk": None} | given
    kept = get_block_map_meansim(q, k, is_causal=is_causal, **given)
    policy = SparsePolicy(smooth_k=False)
    attended = library(q, k, v, policy, is_causal=is_causal, block_mask=kept)
    assert torch.equal(attended, by_topk(q, k, v, is_causal=is_causal, smooth_k=False, **given))
    assert kept.shape == (2, 4, 6, 11) and 0.1 < kept.float().mean() < 0.95
    first_query_after, first_key = (torch.arange(6) + 1) * 128, torch.arange(11) * 64
    assert not (is_causal and kept[..., first_key >= first_query_after[:, None]].any())


@pytest.mark.parametrize(
    ("given", "keys", "words"),
    [
        ({"BLKQ": 64, "BLKK": 128}, 128, "maps of 128 x 64 tokens a block are served on every GPU"),
        ({"return_lut": True}, 128, "without lookup tables"),
        ({"topk": 0.5}, 128, "set exactly one"),
        ({"is_causal": True}, 100, "128 queries and 100 keys"),
        ({"simthreshd1": torch.ones(3)}, 128, "each of the 1 query heads"),
    ],
)
def test_what_a_block_map_refuses(make_qkv, given: dict[str, Any], keys: int, words: str) -> None:
    q, k, _ = make_qkv(1, 1, 128, 64, kv_tokens=keys)
    with pytest.raises(ValueError, match=words):
        get_block_map_meansim(q, k, **given)


def test_a_map_of_keys_without_their_mean(make_qkv) -> None:
    """As packs for MiniMax H3 ask for it, which take the first of five results."""
    q, k, _ = make_qkv(1, 2, 700, 64)
    k, given = k + 5, {"topk": 0.3, "cdfthreshd": None}
    mean = k.mean(2, keepdim=True)
    kept, *operands = get_block_map_meansim_fuse_quant(q, k, mean, **given)
    assert torch.equal(kept, get_block_map_meansim(q, k - mean, **given))
    assert operands == [None] * 4

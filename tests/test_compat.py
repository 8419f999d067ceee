# SPDX-License-Identifier: Apache-2.0
"""Upstream's functions: the same call, each parameter honoured or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparge
from sparge import compat
from sparge.common.metrics import rel_l1
from sparge.compat.mask import read_block_mask
from sparge.reference import exact_attention

# Parameter -> default, in order; "required" has none. From upstream's README and core.py.
COMMON = {"q": "required", "k": "required", "v": "required"}
MEANSIM = {
    **COMMON,
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "smooth_k": True,
}
TAIL = {
    "pvthreshd": 50,
    "attention_sink": False,
    "tensor_layout": "HND",
    "output_dtype": None,  # upstream's torch.float16 never had an effect
    "return_sparsity": False,
}
TOPK = {**MEANSIM, "simthreshd1": -0.1, "cdfthreshd": None, "topk": 0.5, **TAIL}
CDF = {**MEANSIM, "simthreshd1": 0.6, "cdfthreshd": 0.98, **TAIL}
SIGNATURES = {
    "spas_sage2_attn_meansim_topk_cuda": TOPK,
    "spas_sage_attn_meansim_topk_cuda": TOPK,
    "spas_sage2_attn_meansim_cuda": CDF,
    "spas_sage_attn_meansim_cuda": CDF,
    "block_sparse_sage2_attn_cuda": {
        **COMMON,
        "mask_id": None,
        "dropout_p": 0.0,
        "scale": None,
        "smooth_k": True,
        **TAIL,
    },
}
library: Any = sparge.attention
TOPK_NAMES = [name for name in SIGNATURES if "topk" in name]
CDF_NAMES = [name for name in SIGNATURES if name.endswith("meansim_cuda")]
MEANSIM_NAMES = TOPK_NAMES + CDF_NAMES


def function(name: str) -> Callable[..., Any]:
    return getattr(compat, name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_upstreams(name: str) -> None:
    parameters = inspect.signature(function(name)).parameters
    defaults = {
        key: "required" if value.default is inspect.Parameter.empty else value.default
        for key, value in parameters.items()
    }
    assert list(defaults.items()) == list(SIGNATURES[name].items())


@pytest.mark.parametrize("name", MEANSIM_NAMES)
def test_selection_is_the_librarys_attention(make_qkv, name: str) -> None:
    q, k, v = make_qkv(1, 2, 640, 64)
    if "topk" in name:
        given: dict[str, Any] = {"topk": 0.3}
        policy = sparge.SparsePolicy(topk=0.3, keep_diagonal=False)
    else:
        q, k = (x + x.float().cumsum(2).bfloat16() / 30 for x in (q, k))
        given = {"simthreshd1": 0.05, "cdfthreshd": 0.7}
        policy = sparge.SparsePolicy(select_by="cdf", keep_diagonal=False, **given)
    out, sparsity = function(name)(q, k, v, return_sparsity=True, **given)
    assert torch.equal(out, library(q, k, v, policy)) and isinstance(sparsity, float)
    assert sparsity == pytest.approx(1 - sparge.make_plan(q, k, policy).density())
    assert 0.1 < sparsity < 0.9


def test_cdf_through_the_topk_function(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 640, 64)
    by_topk = function("spas_sage2_attn_meansim_topk_cuda")
    out = by_topk(q, k, v, cdfthreshd=0.5, topk=None)
    assert torch.equal(
        out, function("spas_sage2_attn_meansim_cuda")(q, k, v, simthreshd1=-0.1, cdfthreshd=0.5)
    )
    for pair in ({"topk": 0.5, "cdfthreshd": 0.9}, {"topk": None}):
        with pytest.raises(sparge.Unsupported, match="set exactly one"):
            by_topk(q, k, v, **pair)


@pytest.mark.parametrize("name", MEANSIM_NAMES)
def test_causal_element_by_element(make_qkv, name: str) -> None:
    """Upstream's second generation leaks up to 127 future tokens here."""
    q, k, v = make_qkv(1, 2, 300, 64)
    out = function(name)(q, k, v, is_causal=True, simthreshd1=1.0)
    assert rel_l1(out, exact_attention(q, k, v, is_causal=True)[0]) < 0.02


def test_causal_ranks_in_all_blocks_and_leaves_the_diagonal_unprotected(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 640, 64)
    by_topk = function("spas_sage2_attn_meansim_topk_cuda")
    _, sparsity = by_topk(q, k, v, is_causal=True, topk=0.2, return_sparsity=True)
    policy = sparge.SparsePolicy(topk=0.2, keep_diagonal=False)
    plan = sparge.make_plan(q, k, policy, is_causal=True)
    assert plan.counts.flatten().tolist() == [2] * 5, "int(.2 * 10 blocks) in every row"
    assert sparsity == pytest.approx(1 - plan.density())


NEW_NAMES = [name for name in SIGNATURES if "sage2" in name]


@pytest.mark.parametrize("name", NEW_NAMES)
def test_scale_reaches_selection_and_attention(make_qkv, name: str) -> None:
    q, k, v = make_qkv(1, 1, 300, 64)
    extra: dict[str, Any] = {} if "meansim" in name else {"mask_id": torch.ones(1, 1, 3, 5)}
    if name.endswith("meansim_cuda"):
        extra = {"cdfthreshd": 0.6, "simthreshd1": -1.0}
    out = function(name)(q, k, v, scale=0.5, **extra)
    # The same logits with the scale inside q: every stage must have used it.
    same = function(name)(q * 4, k, v, scale=0.125, **extra)
    assert torch.equal(out, same)
    assert not torch.equal(out, function(name)(q, k, v, **extra))


@pytest.mark.parametrize("name", NEW_NAMES)
def test_layout_dtype_and_smoothing(make_qkv, name: str) -> None:
    q, k, v = make_qkv(2, 4, 300, 64, kv_heads=2, kv_tokens=200)
    extra = {} if "meansim" in name else {"mask_id": torch.ones(2, 4, 3, 4, dtype=torch.int32)}
    call = function(name)
    out = call(q, k, v, **extra)
    assert out.dtype == torch.bfloat16
    assert call(q, k, v, output_dtype=torch.float16, **extra).dtype == torch.float16
    assert call(q.float(), k.float(), v.float(), **extra).dtype == torch.float32
    transposed = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    nhd = call(*transposed, tensor_layout="NHD", **extra)
    assert nhd.shape == (2, 300, 4, 64)
    assert torch.equal(nhd.transpose(1, 2), out)
    rough = call(q, k + 30, v, smooth_k=False, **extra)
    smooth = call(q, k + 30, v, smooth_k=True, **extra)
    exact, _ = exact_attention(q, k + 30, v)
    if "meansim" not in name:
        assert rel_l1(smooth, exact) < 0.02 < rel_l1(rough, exact)
    else:
        assert not torch.equal(rough, smooth)


@pytest.mark.parametrize("name", MEANSIM_NAMES)
def test_thresholds_by_head(make_qkv, name: str) -> None:
    q, k, v = make_qkv(1, 2, 640, 64)
    share = "topk" if "topk" in name else "cdfthreshd"
    base = {"simthreshd1": -1.0}
    call = function(name)
    out = call(q, k, v, **base, **{share: torch.tensor([0.2, 1.0])})
    assert torch.equal(out[:, :1], call(q[:, :1], k[:, :1], v[:, :1], **base, **{share: 0.2}))
    assert torch.equal(out[:, 1:], call(q[:, 1:], k[:, 1:], v[:, 1:], **base, **{share: 1.0}))
    integers = call(q, k, v, **base, **{share: torch.tensor([1, 1])})
    assert torch.equal(integers, call(q, k, v, **base, **{share: 1.0}))


def test_sink_and_pvthreshd(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 640, 64)
    call = function("spas_sage2_attn_meansim_topk_cuda")
    raised = v.clone()
    raised[:, :, :64] += 100
    assert (call(q, k, raised, topk=0.1, attention_sink=True) > 10).any(-1).all()
    assert not (call(q, k, raised, topk=0.1) > 10).any(-1).all()
    q, k[:, :, :64] = q + 1, k[:, :, :64] + 2  # the first block's logits lie about 16 above
    everything = call(q, k, v, topk=1.0)
    assert torch.equal(everything, call(q, k, v, topk=1.0, pvthreshd=1000))
    filtered = call(q, k, v, topk=1.0, pvthreshd=2.0)
    assert not torch.equal(everything, filtered) and rel_l1(filtered, everything) < 0.01


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_is_refused_says_why(make_qkv, name: str) -> None:
    q, k, v = make_qkv(1, 1, 128, 64)
    with pytest.raises(sparge.Unsupported, match="no dropout"):
        function(name)(q, k, v, dropout_p=0.1)
    if "meansim" in name:
        with pytest.raises(sparge.Unsupported, match="no element mask"):
            function(name)(q, k, v, attn_mask=torch.ones(128, 128, dtype=torch.bool))
        with pytest.raises(ValueError, match="layout"):
            function(name)(q, k, v, tensor_layout="BHND")


block_sparse = function("block_sparse_sage2_attn_cuda")


class TestBlockSparse:
    def test_keeps_what_the_mask_says(self, make_qkv, generator: torch.Generator) -> None:
        q, k, v = make_qkv(2, 4, 300, 64, kv_heads=2, kv_tokens=500)
        mask = torch.rand(2, 4, 3, 8, generator=generator) < 0.4
        mask[0, 1, 2] = False
        out, sparsity = block_sparse(q, k, v, mask.int(), return_sparsity=True)
        plan = sparge.BlockPlan.from_kept(mask, 300, 500)
        exact, _ = exact_attention(q, k, v, plan.kept())
        assert out[0, 1, 256:].abs().max() == 0, "upstream leaves such rows unwritten"
        assert rel_l1(out, exact) < 0.02
        assert sparsity == pytest.approx(1 - plan.density())

    @pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
    def test_the_sink_is_the_first_64_keys(self, make_qkv, shape: tuple[int, int]) -> None:
        q, k, v = make_qkv(1, 1, 256, 64)
        mask = torch.zeros(1, 1, *shape, dtype=torch.bool)
        out = block_sparse(q, k, v, mask, attention_sink=True)
        exact, _ = exact_attention(q, k[:, :, :64], v[:, :, :64])
        assert rel_l1(out, exact) < 0.02
        assert not mask.any(), "the caller's mask is not changed"

    @pytest.mark.parametrize(
        ("mask", "words"),
        [
            (None, r"mask_id is None.*\(1, 2, 2, 4\)"),
            ([[1]], "mask_id is a list; it is a tensor"),
            *((torch.ones(x), r"\(1, 2, 2, 4\).*\(1, 2, 4, 2\).*every GPU")
              for x in ((1, 2, 4, 1), (1, 1, 2, 4), (2, 4))),
        ],
    )  # fmt: skip
    def test_other_masks_are_refused(self, make_qkv, mask: Any, words: str) -> None:
        with pytest.raises(sparge.Unsupported, match=words):
            block_sparse(*make_qkv(1, 2, 256, 64), mask)


def by_token(mask: torch.Tensor, rows: int, columns: int, queries: int, keys: int) -> torch.Tensor:
    """A mask of rows x columns blocks as one of single queries and keys."""
    return mask.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[:, :, :queries, :keys]


def of_tokens(pairs: torch.Tensor) -> torch.Tensor:
    """The smallest mask of 128 x 64 blocks that keeps every pair of (B, H, Nq, Nk)."""
    rows = torch.stack([part.any(2) for part in pairs.split(128, 2)], 2)
    return torch.stack([part.any(3) for part in rows.split(64, 3)], 3)


class TestHopperMask:
    """Masks of 64 x 128 blocks, which other packages build where the GPU is an H100."""

    @pytest.mark.parametrize("tokens", [300, 129])
    def test_rows_that_agree_are_taken_exactly(self, make_qkv, generator, tokens: int) -> None:
        """RadialAttn makes such masks: of 128 x 128 blocks, split one way or the other."""
        q, k, v = make_qkv(1, 2, tokens, 64)
        square = torch.rand(1, 2, 4, 4, generator=generator) < 0.4
        square[:, :, 0, 0] = True
        wide = square.repeat_interleave(2, 2)[:, :, : -(-tokens // 64), : -(-tokens // 128)]
        ours = square.repeat_interleave(2, 3)[:, :, : -(-tokens // 128), : -(-tokens // 64)]
        out, sparsity = block_sparse(q, k, v, wide.int(), return_sparsity=True)
        same, of_ours = block_sparse(q, k, v, ours.int(), return_sparsity=True)
        assert torch.equal(out, same) and sparsity == of_ours

    @pytest.mark.parametrize("queries, keys", [(300, 500), (65, 1), (190, 127)])
    def test_rows_that_differ_keep_both(self, make_qkv, generator, queries: int, keys: int) -> None:
        q, k, v = make_qkv(2, 4, queries, 64, kv_heads=2, kv_tokens=keys)
        shape = (2, 4, -(-queries // 64), -(-keys // 128))
        wide = torch.rand(shape, generator=generator) < 0.3
        smallest = of_tokens(by_token(wide, 64, 128, queries, keys))
        assert torch.equal(read_block_mask(wide.int(), q, k, "HND"), smallest)
        out, sparsity = block_sparse(q, k, v, wide, return_sparsity=True)
        assert torch.equal(out, block_sparse(q, k, v, smallest))
        plan = sparge.BlockPlan.from_kept(smallest, queries, keys)
        assert sparsity == pytest.approx(1 - plan.density())

    def test_the_two_shapes_are_one_for_one_block_only(self, make_qkv) -> None:
        q, k, v = make_qkv(1, 1, 64, 64)
        kept = block_sparse(q, k, v, torch.ones(1, 1, 1, 1))
        assert rel_l1(kept, exact_attention(q, k, v)[0]) < 0.02
        assert not block_sparse(q, k, v, torch.zeros(1, 1, 1, 1)).any()

# SPDX-License-Identifier: Apache-2.0
"""Upstream's functions: the same call, each parameter honoured or refused."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sparge
from sparge import compat
from sparge.metrics import rel_l1
from sparge.reference import exact_attention

ROOT = Path(__file__).parent.parent
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


@pytest.mark.parametrize(
    "name", ["spas_sage2_attn_meansim_topk_cuda", "spas_sage_attn_meansim_topk_cuda"]
)
def test_topk_is_the_librarys_attention(make_qkv, name: str) -> None:
    q, k, v = make_qkv(1, 2, 640, 64)
    out, sparsity = function(name)(q, k, v, topk=0.3, return_sparsity=True)
    policy = sparge.SparsePolicy(topk=0.3, keep_diagonal=False)
    assert torch.equal(out, library(q, k, v, policy))
    assert sparsity == pytest.approx(0.7), "3 of 10 blocks of 64 keys"
    assert isinstance(sparsity, float)


@pytest.mark.parametrize("name", CDF_NAMES)
def test_cdf_is_the_librarys_attention(make_qkv, name: str) -> None:
    q, k, v = make_qkv(1, 2, 640, 64)
    q, k = (x + x.float().cumsum(2).bfloat16() / 30 for x in (q, k))
    given: dict[str, Any] = {"simthreshd1": 0.05, "cdfthreshd": 0.7}
    out, sparsity = function(name)(q, k, v, return_sparsity=True, **given)
    policy = sparge.SparsePolicy(select_by="cdf", keep_diagonal=False, **given)
    assert torch.equal(out, library(q, k, v, policy))
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
    everything = {"simthreshd1": 1.0}
    out = function(name)(q, k, v, is_causal=True, **everything)
    exact, _ = exact_attention(q, k, v, is_causal=True)
    assert rel_l1(out, exact) < 0.02
    k[:, :, 200:] = v[:, :, 200:] = 40
    changed = function(name)(q, k, v, is_causal=True, smooth_k=False, **everything)
    exact, _ = exact_attention(q, k, v, is_causal=True)
    assert rel_l1(changed[:, :, :200], exact[:, :, :200]) < 0.03


def test_causal_ranks_in_all_blocks_and_leaves_the_diagonal_unprotected(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 640, 64)
    _, sparsity = function("spas_sage2_attn_meansim_topk_cuda")(
        q, k, v, is_causal=True, topk=0.2, return_sparsity=True
    )
    policy = sparge.SparsePolicy(topk=0.2, keep_diagonal=False)
    plan = sparge.make_plan(q, k, policy, is_causal=True)
    assert plan.counts.flatten().tolist() == [2] * 5, "int(.2 * 10 blocks) in every row"
    assert sparsity == pytest.approx(1 - plan.density())


@pytest.mark.parametrize("name", SIGNATURES)
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


@pytest.mark.parametrize("name", SIGNATURES)
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


def test_sink_keeps_the_first_block(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 640, 64)
    v[:, :, :64] += 100
    call = function("spas_sage2_attn_meansim_topk_cuda")
    assert (call(q, k, v, topk=0.1, attention_sink=True) > 10).any(-1).all()
    assert not (call(q, k, v, topk=0.1) > 10).any(-1).all()


def test_pvthreshd_skips(make_qkv) -> None:
    q, k, v = make_qkv(1, 1, 640, 64)
    q, k[:, :, :64] = q + 1, k[:, :, :64] + 2  # the first block's logits lie about 16 above
    call = function("spas_sage2_attn_meansim_topk_cuda")
    everything = call(q, k, v, topk=1.0)
    assert torch.equal(everything, call(q, k, v, topk=1.0, pvthreshd=1000))
    filtered = call(q, k, v, topk=1.0, pvthreshd=2.0)
    assert not torch.equal(everything, filtered)
    assert rel_l1(filtered, everything) < 0.01


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
        exact, _ = exact_attention(q, k, v, plan=plan)
        assert out[0, 1, 256:].abs().max() == 0, "upstream leaves such rows unwritten"
        assert rel_l1(out, exact) < 0.02
        assert sparsity == pytest.approx(1 - plan.density())

    def test_sink(self, make_qkv) -> None:
        q, k, v = make_qkv(1, 1, 256, 64)
        mask = torch.zeros(1, 1, 2, 4, dtype=torch.bool)
        out = block_sparse(q, k, v, mask, attention_sink=True)
        exact, _ = exact_attention(q, k[:, :, :64], v[:, :, :64])
        assert rel_l1(out, exact) < 0.02
        assert not mask.any(), "the caller's mask is not changed"

    def test_none_is_refused(self, make_qkv) -> None:
        with pytest.raises(sparge.Unsupported, match=r"mask_id is None.*\(1, 2, 2, 4\)"):
            block_sparse(*make_qkv(1, 2, 256, 64))

    @pytest.mark.parametrize("shape", [(1, 2, 4, 2), (1, 1, 2, 4), (2, 4)])
    def test_other_shapes_are_refused(self, make_qkv, shape: tuple[int, ...]) -> None:
        """(1, 2, 4, 2) is upstream's 64 x 128 layout of Hopper."""
        with pytest.raises(sparge.Unsupported, match=r"\(1, 2, 2, 4\).*every GPU"):
            block_sparse(*make_qkv(1, 2, 256, 64), torch.ones(shape))


def test_the_shim_gives_these_functions() -> None:
    path = ROOT / "shim" / "spas_sage_attn" / "__init__.py"
    spec = importlib.util.spec_from_file_location("spas_sage_attn_shim", path)
    assert spec is not None
    assert spec.loader is not None
    shim = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shim)
    assert sorted(shim.__all__) == sorted(SIGNATURES)
    for name in SIGNATURES:
        assert getattr(shim, name) is getattr(compat, name)

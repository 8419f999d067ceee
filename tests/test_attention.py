# SPDX-License-Identifier: Apache-2.0
"""The public call on a machine without a usable GPU: arguments, layouts, plans, statistics."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import sparge
from sparge import Precision, SparsePolicy, reference
from sparge.common.metrics import rel_l1

attention: Any = sparge.attention  # a tensor, or a pair with return_lse
DENSE = SparsePolicy(topk=1.0)
SPARSE = SparsePolicy(topk=0.4)


def test_this_machine_runs_the_reference(make_qkv, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests of this file are about the reference; the GPU has a suite of its own."""
    assert not sparge.capabilities(torch.device("cpu")).usable
    spy = mock.Mock(wraps=reference.attention)
    monkeypatch.setattr(reference, "attention", spy)
    attention(*make_qkv())
    spy.assert_called_once()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("precision", list(Precision))
def test_replaces_torchs_attention(make_qkv, dtype: torch.dtype, precision: Precision) -> None:
    q, k, v = make_qkv(2, 4, 300, 64 if dtype == torch.bfloat16 else 40, kv_heads=2, dtype=dtype)
    for is_causal in (False, True):
        policy = SparsePolicy(topk=1.0, precision=precision)
        out = attention(q, k, v, policy, is_causal=is_causal)
        truth = scaled_dot_product_attention(
            q.float(), k.float(), v.float(), is_causal=is_causal, enable_gqa=True
        )
        assert out.dtype == dtype and out.shape == q.shape
        # bf16 values keep 8 bits: 2 ** -9 on average from P, V and the output each.
        assert rel_l1(out, truth) < (0.006 if precision is Precision.SIXTEEN_BIT else 0.015)


@pytest.mark.parametrize("out_layout", [None, "HND", "NHD"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_layouts(make_qkv, layout: str, out_layout: str | None) -> None:
    q, k, v = make_qkv(2, 3, 200, 64, kv_tokens=330)
    expected = attention(q, k, v, SPARSE)
    given = [x if layout == "HND" else x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = attention(*given, SPARSE, layout=layout, out_layout=out_layout)
    wanted = out_layout or layout
    assert out.is_contiguous()
    assert torch.equal(out if wanted == "HND" else out.transpose(1, 2), expected)


def test_mixed_input_dtypes_and_float32_are_read_as_bf16(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 200, 64)
    out = attention(q, k.float(), v.half(), SPARSE)
    assert out.dtype == torch.bfloat16
    assert rel_l1(out, attention(q, k, v, SPARSE)) < 1e-3
    q, k, v = make_qkv(1, 2, 200, 64, dtype=torch.float32)
    rounded = (x.bfloat16() for x in (q, k, v))
    expected = attention(*rounded, SPARSE, output_dtype=torch.float32)
    assert torch.equal(attention(q, k, v, SPARSE), expected)


def test_key_lengths_cut_keys(make_qkv) -> None:
    q, k, v = make_qkv(2, 2, 300, 64)
    lengths = torch.tensor([300, 77], dtype=torch.int32)
    out = attention(q, k, v, DENSE, key_lengths=lengths)
    assert torch.equal(out[:1], attention(q[:1], k[:1], v[:1], DENSE))
    assert torch.equal(out[1:], attention(q[1:], k[1:, :, :77], v[1:, :, :77], DENSE))


def test_lse_is_of_the_true_logits(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 200, 64)
    k = k + 3  # far from zero mean: smoothing K must not show
    out, lse = attention(q, k, v, DENSE, return_lse=True)
    truth = (q.float() @ k.float().mT / 8).logsumexp(-1)
    assert lse.dtype == torch.float32
    assert lse.shape == (1, 2, 200)
    assert (lse - truth).abs().max() < 0.05
    assert torch.equal(out, attention(q, k, v, DENSE))
    nothing = torch.zeros(1, dtype=torch.int32)
    out, lse = attention(q, k, v, DENSE, return_lse=True, key_lengths=nothing)
    assert out.abs().max() == 0
    assert (lse == -math.inf).all()


def test_lse_merges_two_halves_of_the_keys(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 200, 64, kv_tokens=640)
    halves = [
        attention(
            q, k[:, :, part], v[:, :, part], DENSE, return_lse=True, output_dtype=torch.float32
        )
        for part in (slice(0, 320), slice(320, 640))
    ]
    lse = torch.stack([half[1] for half in halves])
    weights = lse.softmax(0).unsqueeze(-1)
    merged = sum(w * half[0] for w, half in zip(weights, halves, strict=True))
    truth = scaled_dot_product_attention(q.float(), k.float(), v.float())
    assert isinstance(merged, torch.Tensor)
    assert rel_l1(merged, truth) < 0.015


class TestPlan:
    @pytest.mark.parametrize(("layout", "is_causal"), [("HND", True), ("NHD", False)])
    def test_reuse_gives_the_same(self, make_qkv, layout: str, is_causal: bool) -> None:
        q, k, v = make_qkv(2, 4, 300, 64, kv_heads=2, layout=layout)
        lengths = torch.tensor([300, 200], dtype=torch.int32)
        named = {"layout": layout, "is_causal": is_causal, "key_lengths": lengths}
        plan, stats = sparge.make_plan(q, k, SPARSE, **named), sparge.AttentionStats("cpu")
        assert torch.equal(plan.kept().sum(-1), plan.counts)
        expected = attention(q, k, v, SPARSE, stats=stats, **named)
        assert stats.density == pytest.approx(plan.density())
        counters = stats.counters.clone()
        assert torch.equal(attention(q, k, v, SPARSE, plan=plan, **named), expected)
        again = attention(q, k, v, SPARSE, plan=plan, layout=layout, stats=stats)
        assert torch.equal(again, expected) and torch.equal(stats.counters, 2 * counters)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
    def test_from_a_block_mask(self, make_qkv, generator: torch.Generator, dtype) -> None:
        q, k, v = make_qkv(1, 2, 300, 64)
        mask = torch.rand(1, 2, 3, 5, generator=generator) < 0.5
        plan = sparge.make_plan(q, k, SPARSE, block_mask=mask.to(dtype))
        assert torch.equal(plan.kept(), mask)
        direct = attention(q, k, v, SPARSE, block_mask=mask.to(dtype))
        assert torch.equal(attention(q, k, v, SPARSE, plan=plan), direct)

    def test_of_another_call_is_refused(self, make_qkv) -> None:
        q, k, v = make_qkv(1, 2, 300, 64)
        plan = sparge.make_plan(q, k, SPARSE)
        mask = torch.ones(1, 2, 3, 5)
        with pytest.raises(ValueError, match=r"\(1, 2, 300, 300\)"):
            attention(q[:, :, :200], k, v, SPARSE, plan=plan)
        with pytest.raises(ValueError, match="is_causal"):
            attention(q, k, v, SPARSE, plan=plan, is_causal=True)
        with pytest.raises(ValueError, match="key_lengths"):
            lengths = torch.tensor([5], dtype=torch.int32)
            attention(q, k, v, SPARSE, plan=plan, key_lengths=lengths)
        with pytest.raises(ValueError, match="block_mask"):
            attention(q, k, v, SPARSE, plan=plan, block_mask=mask)

    def test_made_by_hand_lies_as_kernels_read_it(self, make_qkv) -> None:
        q, k, v = make_qkv(2, 2, 300, 64)
        one = sparge.make_plan(q[:1], k[:1], SPARSE)
        both = sparge.BlockPlan(
            one.block_map.expand(2, -1, -1, -1), one.counts.expand(2, -1, -1), 300, 300
        )
        assert both.block_map.is_contiguous() and both.counts.is_contiguous()
        alone = attention(q[:1], k[:1], v[:1], SPARSE, plan=one)
        assert torch.equal(attention(q, k, v, SPARSE, plan=both)[:1], alone)


@pytest.mark.parametrize("pools", [True, False])
def test_a_budget_that_does_not_pool_drops(make_qkv, pools: bool) -> None:
    """Kernels do the same, for which nothing is prepared then."""
    q, k, v = make_qkv(1, 2, 2000, 64)
    plain = sparge.HeadSettings.uniform(2, 0.3)
    ones = torch.ones(2)
    head_settings = replace(
        plain, pool_weight=ones, router=ones.int() * sparge.Router.ERROR, pools=pools
    )
    same = torch.equal(
        attention(q, k, v, head_settings=head_settings), attention(q, k, v, head_settings=plain)
    )
    assert same != pools


class TestStats:
    def test_add_up_over_calls(self, make_qkv) -> None:
        q, k, v = make_qkv(1, 2, 640, 64)
        stats = sparge.AttentionStats("cpu")
        assert (stats.density, stats.calls, stats.blocks_kept) == (1.0, 0, 0)
        attention(q, k, v, SparsePolicy(topk=0.2), stats=stats)
        assert stats.density == pytest.approx(0.2)
        assert stats.blocks_kept == 2 * 5 * 2  # of 2 heads and 5 query blocks, 2 of 10
        attention(q, k, v, DENSE, stats=stats)
        assert stats.density == pytest.approx(0.6)
        assert stats.blocks_kept == 2 * 5 * (2 + 10)
        assert stats.calls == 2
        assert stats.pv_skipped_share == 0
        stats.reset()
        assert (stats.density, stats.calls) == (1.0, 0)

    def test_pv_filter(self, make_qkv) -> None:
        q, k, v = make_qkv(1, 1, 640, 64)
        q, k[:, :, :64] = q + 1, k[:, :, :64] + 2
        stats = sparge.AttentionStats("cpu")
        attention(q, k, v, SparsePolicy(topk=1.0, pvthreshd=2.0), stats=stats)
        assert 0.5 < stats.pv_skipped_share <= 0.9


def test_thresholds_by_head(make_qkv) -> None:
    q, k, v = make_qkv(1, 3, 640, 64)
    policy = SparsePolicy(topk=torch.tensor([0.1, 0.5, 1.0]))
    plan = sparge.make_plan(q, k, policy)
    assert plan.counts[0, :, 0].tolist() == [1, 5, 10]
    with pytest.raises(ValueError, match="3 query heads"):
        attention(q, k, v, SparsePolicy(topk=torch.tensor([0.1, 0.5])))


def test_partials_give_the_output(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 300, 64)
    partials = sparge.attention_partials(q, k, v, SPARSE)
    out = attention(q, k, v, SPARSE, output_dtype=torch.float32)
    assert (partials.out_sum / partials.row_sum.unsqueeze(-1) - out).abs().max() < 1e-4
    assert partials.row_max.shape == partials.row_sum.shape == (1, 2, 300)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "kind", "words"),
        [
            (lambda q, k, v: (q[0], k, v), ValueError, r"q has shape \(2, 256, 64\)"),
            (lambda q, k, v: (q.double(), k, v), sparge.Unsupported, "bfloat16, float16"),
            (lambda q, k, v: (q, k[..., :32], v), ValueError, "B and D must be equal"),
            (lambda q, k, v: (q, k[:, :, :9], v), ValueError, "they must agree"),
            (lambda q, k, v: (q, k, v[..., :32]), sparge.Unsupported, "v has head_dim 32"),
            (lambda q, k, v: (q, k[:, :0], v[:, :0]), ValueError, "empty|heads"),
            (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), ValueError, "empty dimension"),
            (lambda q, k, v: (q.mT.contiguous().mT, k, v), sparge.Unsupported, "contiguous"),
            (lambda q, k, v: (q.repeat(1, 1, 1, 3),) * 3, sparge.Unsupported, "up to 128"),
            (lambda q, k, v: (q.requires_grad_(), k, v), sparge.Unsupported, "no backward"),
        ],
    )
    def test_tensors(self, make_qkv, change: Any, kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=words):
            attention(*change(*make_qkv()))

    @pytest.mark.parametrize(
        ("named", "words"),
        [
            (
                {"stats": sparge.AttentionStats("meta")},
                r"count on meta and q is on cpu: give Atten",
            ),
            ({"layout": "BSHD"}, "'HND'"),
            ({"out_layout": "BSHD"}, "'HND'"),
            ({"key_lengths": torch.tensor([5])}, "int32"),
            ({"key_lengths": torch.tensor([5, 5], dtype=torch.int32)}, "int32 of shape"),
            ({"block_mask": torch.ones(1, 2, 4, 2)}, r"\(1, 2, 2, 4\)"),
        ],
    )
    def test_arguments(self, make_qkv, named: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            attention(*make_qkv(), **named)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        *(({"output_dtype": x}, "output_dtype is") for x in (torch.float64, torch.float8_e4m3fn)),
        *(({"scale": x}, "a finite number") for x in (-1.0, 0.0, 2.0**-21, math.inf, math.nan)),
    ],
)
def test_what_kernels_cannot_take_is_refused(make_qkv, named: dict[str, Any], words: str) -> None:
    with pytest.raises(sparge.Unsupported, match=words):
        attention(*make_qkv(), **named)

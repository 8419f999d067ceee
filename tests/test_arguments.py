# SPDX-License-Identifier: Apache-2.0
"""Arguments of another kind get a sentence, before anything runs; numbers fit what kernels read."""

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
    BlockPlan,
    HeadSettings,
    Precision,
    Router,
    SparsePolicy,
    TokenGrid,
    Unsupported,
    cube_order,
)
from sparge.call import make_call
from sparge.stages import ops, pipeline

attention: Any = sparge.attention
SPARSE = SparsePolicy(topk=0.4)
GRID = TokenGrid(2, 8, 10)
HALF: Any = HeadSettings.uniform(2, 0.5)
# Of any type, for arguments of the wrong one.
policy_of: Any = SparsePolicy
uniform: Any = HeadSettings.uniform


class TestKinds:
    """One sentence that says what was given and what is taken, whatever the parameter."""

    @pytest.mark.parametrize(
        ("named", "words"),
        [
            ({"q": np.zeros((1, 2, 256, 64))}, "q is a numpy.ndarray; give a torch tensor"),
            ({"k": [1.0]}, "k is a list; give a torch tensor"),
            ({"q": None}, "q is None; give a torch tensor"),
            ({"policy": 0.5}, "policy is 0.5; give a SparsePolicy"),
            ({"layout": None}, "layout is None; it takes 'HND'"),
            ({"out_layout": 1}, "out_layout is 1; it takes 'HND'"),
            ({"is_causal": "False"}, "is_causal is 'False'; it takes True or False"),
            ({"is_causal": torch.ones(3)}, "is_causal is a torch.Tensor; it takes True or False"),
            ({"return_lse": "no"}, "return_lse is 'no'; it takes True or False"),
            ({"scale": torch.tensor(0.1)}, "scale is a torch.Tensor; give a number"),
            ({"scale": True}, "scale is True; give a number"),
            ({"key_lengths": [256]}, "key_lengths is a list; give a torch tensor"),
            ({"block_mask": np.ones((1, 2, 2, 4))}, "block_mask is a numpy.ndarray; give a torch"),
            ({"plan": torch.ones(1, 2, 2, 4)}, "plan is a torch.Tensor; give what make_plan makes"),
            ({"order": GRID}, "order is a .*TokenGrid; give what cube_order or grid_order makes"),
            ({"head_settings": 0.3}, "head_settings is 0.3; give what HeadSettings"),
            ({"stats": True}, "stats is True; give an AttentionStats"),
            ({"output_dtype": "float16"}, "output_dtype is float16; bfloat16"),
        ],
    )
    def test_of_a_call(self, make_qkv, named: dict[str, Any], words: str) -> None:
        q, k, v = make_qkv()
        with pytest.raises(ValueError, match=words):
            attention(**({"q": q, "k": k, "v": v} | named))
        shared = {"layout", "is_causal", "scale", "key_lengths", "block_mask", "policy", "q", "k"}
        if named.keys() <= shared:
            with pytest.raises(ValueError, match=words):
                sparge.make_plan(**({"q": q, "k": k} | named))
        if named.keys() <= shared | {"plan", "v"}:
            with pytest.raises(ValueError, match=words):
                sparge.attention_partials(**({"q": q, "k": k, "v": v} | named))

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: policy_of(precision="int8"), "precision is 'int8'; give one of Precision"),
            (lambda: policy_of(exact_prefix=1.5), "exact_prefix is 1.5; it takes a whole numbe"),
            (lambda: policy_of(exact_suffix=True), "exact_suffix is True; it takes a whole num"),
            (lambda: policy_of(exact_prefix=-1), "exact_prefix is -1; it takes a whole number"),
            (lambda: policy_of(keep_diagonal=0), "keep_diagonal is 0; it takes True or False"),
            (lambda: policy_of(select_by="topp"), "'topk'.*'cdf'"),
            (lambda: policy_of(topk=[0.1, 0.2]), "topk is a list; give a number, or a float te"),
            (lambda: policy_of(cdfthreshd=np.ones(2)), "cdfthreshd is a numpy.ndarray; give a"),
            (lambda: policy_of(topk=1.5), "topk is 1.5.*0 to 1"),
            (lambda: policy_of(topk=torch.tensor([1, 0])), "floating point"),
            (lambda: policy_of(pvthreshd=-1.0), "pvthreshd"),
            (lambda: policy_of(simthreshd1=math.nan), "simthreshd1 is nan; it takes a number f"),
            (lambda: replace(HALF, density=0.5), "density is 0.5; give a torch tensor"),
            (lambda: replace(HALF, router=Router.MASS), "router is .*; give a torch tensor"),
            (lambda: replace(HALF, output_scale=1.0), "output_scale is 1.0; give a torch tensor"),
            (lambda: replace(HALF, floor=2**31), "floor is 2147483648; it takes a whole number fr"),
            (lambda: replace(HALF, pools="no"), "pools is 'no'; it takes True or False"),
            (
                lambda: uniform(2.0, 0.5),
                "heads is 2.0; it takes a whole number from 1",
            ),
            (lambda: uniform(2, "half"), "density is 'half'; give a number"),
            (lambda: uniform(2, 1.5), "density is 1.5 and pool_weight 0.0; density t"),
            (lambda: uniform(2, 0.5, -1.0), "density is 0.5 and pool_weight -1.0"),
            (lambda: uniform(2, 0.5, 0.0, "error"), "router is 'error'; it takes Rou"),
        ],
    )
    def test_of_a_policy_and_of_head_settings(self, make: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            make()

    def test_a_routers_number_is_the_router(self) -> None:
        """Kernels prepare what ranking by error reads."""
        assert HeadSettings.uniform(2, 0.5, 0.0, 1).pools  # type: ignore[arg-type]

    def test_thresholds_of_other_heads_beside_a_budget(self, make_qkv) -> None:
        q, k, v = make_qkv()
        for name in ("simthreshd1", "pvthreshd"):
            policy = replace(SPARSE, **{name: torch.ones(5)})
            with pytest.raises(ValueError, match=rf"{name} has shape \(5,\).* 2 query heads"):
                attention(q, k, v, policy, head_settings=HeadSettings.uniform(2, 0.5))

    def test_numpys_numbers_are_numbers(self, make_qkv) -> None:
        q, k, v = make_qkv()
        given: dict[str, Any] = {"topk": np.float32(0.5), "exact_prefix": np.int64(70)}
        policy = SparsePolicy(**given, attention_sink=np.True_)  # type: ignore[arg-type]
        same = SparsePolicy(topk=0.5, exact_prefix=70, attention_sink=True)
        assert policy == same and type(policy.exact_prefix) is int and type(policy.topk) is float
        for given in ({"scale": np.float32(0.125)}, {"is_causal": np.True_}):
            plain = {name: value.item() for name, value in given.items()}
            expected = attention(q, k, v, same, **plain)
            assert torch.equal(attention(q, k, v, policy, **given), expected)
        sizes: list[Any] = [np.int64(2), np.float32(0.5), np.int64(256), np.int32(256)]
        head_settings = HeadSettings.uniform(*sizes[:2])
        assert head_settings.heads == 2 and replace(head_settings, floor=np.int32(3)).floor == 3
        plan = sparge.make_plan(q, k, SPARSE)
        assert BlockPlan(plan.block_map, plan.counts, *sizes[2:]).n_queries == 256


class TestSizes:
    @pytest.mark.parametrize("prefix", [2**32 + 5, 10**30])
    @pytest.mark.parametrize("name", ["exact_prefix", "exact_suffix"])
    def test_text_longer_than_the_sequence_is_all_of_it(
        self, make_qkv, monkeypatch: pytest.MonkeyPatch, name: str, prefix: int
    ) -> None:
        """Kernels are told of it in 32 bits, where the number would be another."""
        q, k, v = make_qkv(1, 2, 300, 64)
        policy = replace(SparsePolicy(topk=0.1, precision=Precision.INT8_FP16), **{name: prefix})
        full = SparsePolicy(topk=1.0, precision=Precision.INT8_FP16)
        assert torch.equal(attention(q, k, v, policy), attention(q, k, v, full))
        assert sparge.make_plan(q, k, policy).density() == 1
        head_settings = HeadSettings.uniform(2, 0.1)
        assert torch.equal(
            attention(q, k, v, policy, head_settings=head_settings),
            attention(q, k, v, full, head_settings=None),
        )
        told: list[list[int]] = []
        monkeypatch.setattr(ops, "route", lambda *given: told.append(given[5]))
        pipeline.route(
            make_call(q, k, v, policy, "HND", False, None, None, None, None), torch.empty(0), None
        )
        (numbers,) = told
        assert 300 in numbers and all(abs(x) < 2**31 for x in numbers)

    @pytest.mark.parametrize(("queries", "keys"), [(2**25, 1), (1, 2**25), (2**31, 1), (1, 2**33)])
    def test_more_tokens_than_kernels_count(self, queries: int, keys: int) -> None:
        q, k = (torch.zeros(1, 1, 1, 64).expand(1, 1, n, 64) for n in (queries, keys))
        with pytest.raises(Unsupported, match=f"{queries} queries and {keys} keys; up to 33554431"):
            attention(q, k, k)


def test_a_token_order_is_of_one_sequence_without_a_past(make_qkv) -> None:
    q, k, v = make_qkv()
    order = cube_order(TokenGrid(1, 16, 16))
    with pytest.raises(Unsupported, match="do not go together"):
        attention(q, k, v, order=order, is_causal=True)
    with pytest.raises(Unsupported, match="the token order is one of 256 tokens"):
        attention(q[:, :, :100], k, v, order=order)


@pytest.mark.parametrize(
    ("policy", "causal", "reason"),
    [
        (SparsePolicy(), True, "later keys"),
        (SparsePolicy(precision=Precision.SIXTEEN_BIT), False, "16-bit operands"),
    ],
)
def test_where_there_is_no_output_scale(
    make_qkv, policy: SparsePolicy, causal: bool, reason: str
) -> None:
    q, k, v = make_qkv()
    head_settings = replace(HeadSettings.uniform(2, 0.3), output_scale=torch.ones(2))
    with pytest.raises(Unsupported, match=f"{reason}.*leave it out"):
        attention(q, k, v, policy, is_causal=causal, head_settings=head_settings)


def test_one_output_scale_a_head() -> None:
    head_settings = HeadSettings.uniform(4, 0.3)
    with pytest.raises(ValueError, match="output_scale has shape"):
        replace(head_settings, output_scale=torch.ones(3))
    scaled = replace(head_settings, output_scale=torch.tensor([1.5, 1.0, 0.5, 1.1]))
    part = scaled.heads_slice(slice(1, 3)).output_scale
    assert part is not None and part.tolist() == [1.0, 0.5]


def test_calls_that_raise_do_not_count(make_qkv, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv()
    stats = AttentionStats("cpu")
    with pytest.raises(ValueError, match="out_layout"):
        attention(q, k, v, stats=stats, out_layout="BHND")
    order = cube_order(TokenGrid(1, 16, 16))
    lengths = torch.tensor([100], dtype=torch.int32)
    with pytest.raises(ValueError, match="key_lengths go down to 100"):
        attention(q, k, v, stats=stats, order=order, key_lengths=lengths)
    assert (stats.calls, stats.blocks_kept, stats.density) == (0, 0, 1.0)

    def refuse(*_: Any) -> None:
        raise Unsupported("too long")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.on_reference, "run", refuse)
        with pytest.raises(Unsupported, match="too long"):
            attention(q, k, v, stats=stats)
    assert stats.calls == 0
    attention(q, k, v, stats=stats)
    assert stats.calls == 1

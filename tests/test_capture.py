# SPDX-License-Identifier: Apache-2.0
"""torch.compile sees a call as one op in one graph; traced here without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import sparge
from sparge import AttentionStats, HeadSettings, SparsePolicy, TokenGrid, grid_order
from sparge.stages import op, prepared
from sparge.stats import Counter

CASES: dict[str, dict[str, Any]] = {
    "bottom-right": {
        "causal": "bottom-right",
        "policy": SparsePolicy(attention_sink=True, exact_prefix=130),
    },
    "order": {
        "order": grid_order(TokenGrid(3, 10, 10)),
        "head_settings": HeadSettings.uniform(3, 0.3, pool_weight=1.0),
    },
    "lengths": {"key_lengths": torch.tensor([70, 300], dtype=torch.int32)},
    "of moved keys": {"key_lengths": torch.tensor([[70], [300]], dtype=torch.int32)},
    "mask": {"block_mask": torch.arange(90).view(2, 3, 3, 5) % 3 == 0},
    "per head": {
        "policy": SparsePolicy(
            select_by="cdf", cdfthreshd=torch.tensor([0.2, 0.5, 1.0]), pvthreshd=3.0
        )
    },
}


@pytest.mark.parametrize(("given", "dynamic"), [(name, name != "per head") for name in CASES])
def test_the_reference_is_one_graph_too(make_qkv, given: str, dynamic: bool) -> None:
    """The same code compiles with the same result where no kernel runs."""
    torch._dynamo.reset()
    q, k, v = make_qkv(2, 3, 300, 64, dtype=torch.float16)
    stats = AttentionStats("cpu")
    options = {"out_layout": "NHD", "return_lse": True, "stats": stats, **CASES[given]}
    if given == "bottom-right":
        q = q[:, :, :200]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        attention: Any = sparge.attention
        out, lse = attention(q * 2, k, v, **options)
        return out.view(q.shape[0], q.shape[2], -1) + 1, lse  # a view: strides must be true

    expected = layer(q, k, v)
    counted = stats.counters.clone()
    assert stats.sparse_calls == 1
    got = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)(q, k, v)
    assert all(map(torch.equal, got, expected))
    assert counted.any() and torch.equal(stats.counters, 2 * counted) and stats.sparse_calls == 2


NUMBERS: dict[str, Any] = {
    "attention": lambda x, topk: sparge.attention(x, x, x, topk=topk),
    "sdpa_call": lambda x, topk: sparge.sdpa_call(x, x, x, topk=topk, min_tokens=1),
    "policy": lambda x, topk: sparge.attention(
        x, x, x, SparsePolicy(topk=topk, pvthreshd=9 * topk)
    ),
}


@pytest.mark.parametrize("call", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("dynamic", [True, None])
def test_a_number_of_a_graph_may_change(make_qkv, call: Any, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    x = make_qkv(1, 2, 300, 64)[0]
    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    for topk in (0.3, 0.6, 1):
        assert torch.equal(compiled(x, topk), call(x, topk))
    with pytest.raises(Exception, match=r"topk is 2\.0; it takes a number from 0 to 1"):
        compiled(x, 2.0)


def test_the_op_passes_opcheck(make_qkv) -> None:
    q, k, v = make_qkv(1, 2, 150, 32)
    facts = f"({SparsePolicy(pvthreshd=15.0).facts}, None, None"
    counters = torch.zeros(len(Counter), dtype=torch.int64)
    for layout, with_lse in (("NHD", True), ("HND", False)):
        rules = f"{facts}, True, False, {layout!r}, 'torch.float32', {with_lse})"
        given = (q, k, v, [None] * 8, None, counters, rules, [0, 7], 0.2)
        torch.library.opcheck(op.attention.default, given)


def ops_of(graph: torch.fx.Graph) -> list[str]:
    return [str(n.target).split(".")[1] for n in graph.nodes if "sparge." in str(n.target)]


@pytest.mark.usefixtures("pretended_gpu")
def test_sizes_may_be_symbols_and_a_trace_builds_nothing(monkeypatch) -> None:
    monkeypatch.setattr(prepared, "load_all", lambda *_: pytest.fail("a trace builds"))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparge.attention(q, k, v, SparsePolicy(topk=0.5))

    q, k, v = (torch.randn(1, 4, 300, 64, dtype=torch.bfloat16) for _ in range(3))
    graph = make_fx(layer, tracing_mode="symbolic")(q, k, v).graph
    assert ops_of(graph) == ["attention"]

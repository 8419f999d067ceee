# SPDX-License-Identifier: Apache-2.0
"""`sparge.sdpa` on a GPU: it waits for nothing, and its graphs count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sparge
from benchmarks.metrics import rel_l2
from tests.gpu.conftest import no_waits

pytestmark = pytest.mark.gpu

torch_attention: Callable[..., Tensor] = functional.scaled_dot_product_attention
WHOLE = sparge.SparsePolicy(topk=1.0)


def test_sparse_calls_wait_for_nobody(make_qkv) -> None:
    q, k, v = make_qkv(1, 4, 1000, 64, kv_heads=2, device="cuda")
    real = (torch.arange(1000, device="cuda") < 700)[None, None, None]
    calls: tuple[dict[str, Any], ...] = ({"attn_mask": real}, {"is_causal": True}, {})
    with torch.inference_mode(), sparge.sdpa(WHOLE, 128) as stats:
        for options in calls:  # reads the mask, loads kernels
            functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        with no_waits():
            outs = [
                functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
                for options in calls
            ]
    assert stats.sparse_calls == 6 and stats.dense_calls == 0
    for out, options in zip(outs, calls, strict=True):
        assert rel_l2(out, torch_attention(q, k, v, enable_gqa=True, **options)) < 0.06


def test_whole_graphs_count_each_run(make_qkv) -> None:
    torch._dynamo.reset()
    q, k, v = make_qkv(1, 4, 1000, 64, device="cuda")

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (
            functional.scaled_dot_product_attention(q * 2, k, v, is_causal=True).transpose(1, 2) + 1
        )

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), sparge.sdpa(min_tokens=128) as own:
        expected = layer(q, k, v)
    with torch.no_grad(), sparge.sdpa(min_tokens=128) as stats:
        for _ in range(3):
            assert torch.equal(compiled(q, k, v), expected)
    assert stats.sparse_calls == 3 and stats.density == pytest.approx(own.density)


def test_a_graph_reads_a_row_of_bools_whenever_it_runs(make_qkv) -> None:
    """What else a mask says nobody can know when the graph is captured."""
    q, k, v = make_qkv(1, 4, 1000, 64, device="cuda")
    places = torch.arange(1000, device="cuda")[None, None, None]
    row = places < 700
    weights = torch.zeros(1, 1, 1, 1000, dtype=q.dtype, device="cuda")
    graph, outs = torch.cuda.CUDAGraph(), []
    with torch.inference_mode(), sparge.sdpa(WHOLE, 128) as stats:
        for mask in (row, weights) * 2:  # loads kernels
            functional.scaled_dot_product_attention(q, k, v, mask)
        torch.cuda.synchronize()
        warm = stats.sparse_calls
        with torch.cuda.graph(graph):
            for mask in (row, weights):
                outs.append(functional.scaled_dot_product_attention(q, k, v, mask))
    assert (warm, stats.sparse_calls, stats.dense_calls) == (4, 5, 1)
    for real in (places < 700, places >= 300, places % 3 > 0):
        row.copy_(real)
        weights.copy_(real * -0.5)
        graph.replay()
        for out, mask in zip(outs, (row, weights), strict=True):
            assert rel_l2(out, torch_attention(q, k, v, mask)) < 0.06

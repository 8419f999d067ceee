# SPDX-License-Identifier: Apache-2.0
"""torch.compile sees the kernels' path as one graph of ops; traced here without a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

import sparge
from sparge import AttentionStats, SparsePolicy
from sparge.kernels import Capability


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = Capability(True, "", "sm_90a")
    for name in ("sparge.attention", "sparge.call"):
        monkeypatch.setattr(importlib.import_module(name), "capabilities", lambda _: capability)
    torch._dynamo.reset()


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("with_stats", [False, True])
def test_one_graph_with_true_strides(with_stats: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    class CapturedError(Exception):
        """Ends the compilation: the kernels of a pretended GPU cannot run."""

    def capture(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> None:
        graphs.append(graph)
        raise CapturedError

    stats = AttentionStats("cpu") if with_stats else None

    @torch.compile(fullgraph=True, backend=capture)
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        policy = SparsePolicy(topk=0.5, pvthreshd=15.0)
        out = sparge.attention(q * 2, k, v, policy, out_layout="NHD", stats=stats)
        assert isinstance(out, Tensor)
        return out.view(q.shape[0], q.shape[2], -1) + 1  # a view: the fake strides must be true

    q, k, v = (torch.randn(1, 4, 300, 64, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(Exception, match="CapturedError"):
        layer(q, k, v)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    ops = [name.split(".")[-1] for name in called if name.startswith("sparge.")]
    assert ops == ["quantize", "route", "attend"]

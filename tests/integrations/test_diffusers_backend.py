# SPDX-License-Identifier: Apache-2.0
"""The backend "sparge" of diffusers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch as dispatch

from benchmarks.metrics import rel_l2
from sparge import SparsePolicy, Unsupported
from sparge.integrations import diffusers
from sparge.integrations.diffusers import register_backend
from tests.tiny_models import pipelines

pytestmark = pytest.mark.usefixtures("reference_allowed")
WHOLE, FEW = SparsePolicy(topk=1.0), SparsePolicy(topk=0.3)
STEPS = 2
SPARSE, CROSS = 2 * STEPS, "fewer than 100 queries or keys (min_tokens)"


@pytest.fixture(autouse=True)
def native_again() -> Iterator[None]:
    """diffusers keeps the last backend for all models of a process."""
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


def test_a_transformer_takes_it_by_its_name() -> None:
    """Registered again it has another policy and counts anew; other models stay as they are."""
    tiny, other = pipelines.wan(), pipelines.wan()
    native = tiny(STEPS, guidance=1.0)
    counted, errors = [], []
    for policy in (WHOLE, FEW):
        stats = register_backend(policy, min_tokens=100)
        tiny.pipe.transformer.set_attention_backend("sparge")
        out = tiny(STEPS, guidance=1.0)
        assert (stats.sparse_calls, dict(stats.reasons)) == (SPARSE, {CROSS: SPARSE})
        counted.append(stats)
        errors.append(rel_l2(out, native))
    assert 0 < errors[0] < 0.03 and errors[0] < errors[1] / 1.5, errors
    assert counted[0].density == 1 and counted[1].density < 0.5
    other.pipe.transformer.set_attention_backend("native")
    assert torch.equal(other(STEPS, guidance=1.0), native)
    assert counted[1].sparse_calls == SPARSE


def test_whole_graphs_have_it() -> None:
    torch._dynamo.reset()
    tiny = pipelines.wan()
    model = tiny.pipe.transformer
    del model.blocks[1:]
    register_backend(FEW, min_tokens=100)
    model.set_attention_backend("sparge")
    expected = tiny(STEPS, guidance=1.0)
    stats = register_backend(FEW, min_tokens=100)
    model.compile(backend="eager", fullgraph=True)
    assert torch.equal(tiny(STEPS, guidance=1.0), expected)
    assert stats.sparse_calls == STEPS


def test_several_gpus_are_refused_where_diffusers_does_not_ask() -> None:
    """It asks where a model is given the backend by name, not in its own context."""
    register_backend(FEW, min_tokens=100)
    shared: Any = object()
    q = torch.randn(1, 320, 2, 64)
    with (
        dispatch.attention_backend("sparge"),
        pytest.raises(Unsupported, match=r"take sparge\.integrations\.diffusers"),
    ):
        dispatch.dispatch_attention_fn(q, q, q, parallel_config=shared)


def test_the_import_registers_it() -> None:
    tiny = pipelines.wan()
    native = tiny(STEPS, guidance=1.0)
    dispatch._AttentionBackendRegistry._backends.pop(dispatch.AttentionBackendName("sparge"))
    importlib.reload(diffusers)
    tiny.pipe.transformer.set_attention_backend("sparge")
    assert torch.equal(tiny(STEPS, guidance=1.0), native), "a short clip"
    stats = register_backend(topk=0.3, min_tokens=100)
    tiny(STEPS, guidance=1.0)
    assert stats.sparse_calls == SPARSE and stats.density < 0.5


def test_another_diffusers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    native = dispatch.AttentionBackendName.NATIVE
    monkeypatch.delitem(dispatch._AttentionBackendRegistry._backends, native)
    with pytest.raises(Unsupported, match=r"with sparge\.sdpa\(policy\):"):
        register_backend()
    importlib.reload(diffusers)

# SPDX-License-Identifier: Apache-2.0
"""Pipelines of diffusers whose transformer torch.compile traces, with sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import sparge
from sparge.integrations.diffusers import enable
from sparge.sdpa import AttentionMode
from tests.tiny_models.pipelines import ALL, Tiny

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left", "fresh_dynamo")

STEPS = 2
SETTINGS: dict[str, Any] = {"topk": 0.5, "min_tokens": 100, "start_percent": 0.5}


def wrapped(tiny: Tiny, fullgraph: bool = False) -> None:
    compiled = torch.compile(tiny.pipe.transformer, backend="eager", fullgraph=fullgraph)
    tiny.pipe.transformer = compiled


def in_place(tiny: Tiny, fullgraph: bool = False) -> None:
    tiny.pipe.transformer.compile(backend="eager", fullgraph=fullgraph)


def by_block(tiny: Tiny, fullgraph: bool = False) -> None:
    tiny.pipe.transformer.compile_repeated_blocks(backend="eager", fullgraph=fullgraph)


@pytest.mark.parametrize(
    ("compiled", "first", "mode", "name"),
    [
        (wrapped, False, "manual", "CogVideoX"),
        (by_block, True, "auto budget", "Wan 2.1"),
    ],
)
def test_a_compiled_model_gives_the_same_bits(
    compiled: Callable[..., None], first: bool, mode: str, name: str
) -> None:
    """In blocks compiled or not, attention is outside of the graphs."""
    tiny = ALL[name]()
    with enable(tiny.pipe, mode, **SETTINGS) as handle:
        expected = tiny(STEPS)
    assert handle.result is not None
    calls = handle.result.counts.sparse
    if first:
        compiled(tiny)
    with enable(tiny.pipe, mode, **SETTINGS) as handle:
        if not first:
            compiled(tiny)
        assert torch.equal(tiny(STEPS), expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        assert handle.result is not None and handle.result.counts.sparse == calls > 0


def test_the_mode_gets_no_graphs_of_its_own() -> None:
    """Mochi's attention has steps that break a graph. Each function in them asks the mode, and
    torch would warn that it compiled that too often."""
    tiny = ALL["Mochi"]()
    for block in tiny.pipe.transformer.transformer_blocks:
        block.compile(backend="eager")
    with enable(tiny.pipe, "manual", **SETTINGS) as handle:
        tiny(STEPS)
    assert handle.result is not None and handle.result.counts.sparse > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    code = AttentionMode.__torch_function__.__code__
    assert not torch._dynamo.eval_frame._debug_get_cache_entry_list(code)


def test_a_whole_graph_inside_sdpa() -> None:
    """Wan makes its heads by `Tensor.unflatten`, which Dynamo alone does not trace there."""
    tiny = ALL["Wan 2.1"]()
    with sparge.sdpa(min_tokens=100) as own:
        expected = tiny(1)
    in_place(tiny, fullgraph=True)
    with sparge.sdpa(min_tokens=100) as stats:
        assert torch.equal(tiny(1), expected)
    assert stats.sparse_calls == own.sparse_calls > 0


@pytest.mark.parametrize(("compiled", "first"), [(by_block, True), (in_place, False)])
def test_a_whole_graph_is_dense_and_says_so(compiled: Callable[..., None], first: bool) -> None:
    tiny = ALL["Wan 2.1"]()
    native = tiny(STEPS)
    if first:
        compiled(tiny, fullgraph=True)
    with enable(tiny.pipe, "manual", **SETTINGS) as handle:
        if not first:
            compiled(tiny, fullgraph=True)
        assert torch.equal(tiny(STEPS), native)
        assert "ompile without fullgraph" in handle.line

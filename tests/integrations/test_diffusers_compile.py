# SPDX-License-Identifier: Apache-2.0
"""Pipelines of diffusers whose transformer torch.compile traces; and passes that end early, in such
a block or not: by Ctrl+C, by another BaseException, by an error. What these leave would serve the
attention of every other model in the process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import sparge
from sparge.compiling import untraced
from sparge.integrations.diffusers import Handle, enable
from sparge.sdpa import AttentionMode
from sparge.session.torch_pass import TorchPass
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
    if compiled is wrapped:
        del tiny.pipe.transformer.transformer_blocks[1:]  # tracing takes the time of this test
    with enable(tiny.pipe, mode, **SETTINGS) as handle:
        expected = tiny(STEPS)
    assert handle.stats is not None
    calls = handle.stats.counts.sparse
    if first:
        compiled(tiny)
    with enable(tiny.pipe, mode, **SETTINGS) as handle:
        if not first:
            compiled(tiny)
        assert torch.equal(tiny(STEPS), expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        assert handle.stats is not None and handle.stats.counts.sparse == calls > 0
        traced = torch._dynamo.utils.counters["frames"]["total"]
        tiny(STEPS)
        assert torch._dynamo.utils.counters["frames"]["total"] == traced, "not in each pass anew"


def test_the_mode_gets_no_graphs_of_its_own() -> None:
    """Mochi's attention has steps that break a graph. Each function in them asks the mode, and
    torch would warn that it compiled that too often."""
    tiny = ALL["Mochi"]()
    tiny.pipe.transformer.transformer_blocks[0].compile(backend="eager")
    with enable(tiny.pipe, "manual", **SETTINGS) as handle:
        tiny(STEPS)
    assert handle.stats is not None and handle.stats.counts.sparse > 0
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
        assert "turn fullgraph off" in handle.line


LONGER = 3
EARLY: dict[str, Any] = SETTINGS | {"start_percent": 0.25}


class Stopped(BaseException):
    """Interrupt that is no Exception, as ComfyUI's Cancel is."""


def calls_of(handle: Handle) -> tuple[int, int, int]:
    """Numbers of sparse, dense and cross-attention calls of the last run."""
    assert handle.stats is not None
    counts = handle.stats.counts
    assert counts.sparse
    return counts.sparse, counts.dense, counts.cross


@contextmanager
def ended_in(part: nn.Module, calls: int, error: type[BaseException]) -> Iterator[None]:
    """Context in which a part of a model raises an error in its last of so many calls."""
    own, left = part.forward, [calls]

    @untraced
    def count() -> None:
        left[0] -= 1
        if not left[0]:
            raise error

    def forward(*args: Any, **kwargs: Any) -> Any:
        count()
        return own(*args, **kwargs)

    part.forward = forward
    with pytest.raises(error):
        yield
    del part.forward


@pytest.fixture
def bystander() -> Callable[[Handle], None]:
    """Checks that attention of another model is PyTorch's own, and counted by no handle."""
    q, k, v = torch.randn(3, 1, 2, 480, 64).bfloat16()
    expected = functional.scaled_dot_product_attention(q, k, v)

    def check(handle: Handle) -> None:
        before = calls_of(handle)
        assert torch.equal(functional.scaled_dot_product_attention(q, k, v), expected)
        assert calls_of(handle) == before
        assert torch.overrides._get_current_function_mode_stack() == []

    return check


def passes_held() -> set[int]:
    """Ids of passes that something still holds."""
    gc.collect()
    return {id(each) for each in gc.get_objects() if type(each) is TorchPass}


@pytest.mark.parametrize(
    ("compiled", "error", "mode"),
    [
        (lambda tiny: None, KeyboardInterrupt, "auto budget"),
        (by_block, Stopped, "manual"),
    ],
)
def test_a_pass_that_ends_within_a_block_leaves_nothing_behind(
    compiled: Callable[..., None], error: type[BaseException], mode: str, bystander: Any
) -> None:
    others = passes_held()  # by log records of other tests
    tiny = ALL["Wan 2.1"]()
    native, model = tiny(LONGER), tiny.pipe.transformer
    with enable(tiny.pipe, mode, **EARLY) as handle:
        expected = tiny(LONGER)
        calls = calls_of(handle)
        compiled(tiny)
        with ended_in(model.blocks[1].attn1, 4, error):
            tiny(LONGER)
        bystander(handle)
        assert not any("forward" in vars(part) for part in model.modules())
        assert passes_held() <= others
        assert handle.stats is not None and handle.stats.stopped
        assert torch.equal(tiny(LONGER), expected)
        assert calls_of(handle) == calls and not handle.stats.stopped
    assert torch.equal(tiny(LONGER), native)


def test_a_pass_that_ends_between_blocks_serves_no_other_model(bystander: Any) -> None:
    """And the next pass works where offloading was put over what is left of it, and was taken
    away."""
    accelerate = pytest.importorskip("accelerate")
    tiny = ALL["Wan 2.1"]()
    native, model = tiny(LONGER), tiny.pipe.transformer
    with enable(tiny.pipe, "manual", **EARLY) as handle:
        expected = tiny(LONGER)
        calls = calls_of(handle)
        with ended_in(model.norm_out, 3, KeyboardInterrupt):
            tiny(LONGER)
        bystander(handle)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
        for _ in range(2):
            assert torch.equal(tiny(LONGER), expected) and calls_of(handle) == calls
        accelerate.hooks.remove_hook_from_submodules(model)
        assert torch.equal(tiny(LONGER), expected) and calls_of(handle) == calls
        with ended_in(model.norm_out, 3, KeyboardInterrupt):
            tiny(LONGER)
    assert torch.equal(tiny(LONGER), native)

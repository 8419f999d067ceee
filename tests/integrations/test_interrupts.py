# SPDX-License-Identifier: Apache-2.0
"""Passes that end early: by Ctrl+C, by another BaseException, or by an error in a compiled block.
What they leave would serve the attention of every other model in the process."""

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

from sparge.compiling import untraced
from sparge.integrations.diffusers import enable
from sparge.integrations.diffusers.handle import Handle
from sparge.session.torch_pass import TorchPass
from tests.tiny_models.pipelines import ALL

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

SETTINGS: dict[str, Any] = {"topk": 0.5, "min_tokens": 100, "start_percent": 0.25}
STEPS = 3


class Stopped(BaseException):
    """Interrupt that is no Exception, as ComfyUI's Cancel is."""


def calls_of(handle: Handle) -> tuple[int, int, int]:
    """Numbers of sparse, dense and cross-attention calls of the last run."""
    assert handle.result is not None
    counts = handle.result.counts
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


def as_it_is(model: Any) -> None:
    pass


def by_block(model: Any) -> None:
    model.compile_repeated_blocks(backend="eager")


def whole(model: Any) -> None:
    model.compile(backend="eager")


def passes_held() -> set[int]:
    """Ids of passes that something still holds."""
    gc.collect()
    return {id(each) for each in gc.get_objects() if type(each) is TorchPass}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("compiled", "error", "mode"),
    [
        (as_it_is, KeyboardInterrupt, "auto budget"),
        (by_block, ArithmeticError, "manual"),
        (whole, Stopped, "manual"),
    ],
)
def test_a_pass_that_ends_within_a_block_leaves_nothing_behind(
    compiled: Callable[[Any], None], error: type[BaseException], mode: str, bystander: Any
) -> None:
    others = passes_held()  # by log records of other tests
    tiny = ALL["Wan 2.1"]()
    native, model = tiny(STEPS), tiny.pipe.transformer
    with enable(tiny.pipe, mode, **SETTINGS) as handle:
        expected = tiny(STEPS)
        calls = calls_of(handle)
        compiled(model)
        with ended_in(model.blocks[1].attn1, 4, error):
            tiny(STEPS)
        bystander(handle)
        assert not any("forward" in vars(part) for part in model.modules())
        assert passes_held() <= others
        assert handle.result is not None and handle.result.stopped
        assert torch.equal(tiny(STEPS), expected)
        assert calls_of(handle) == calls and not handle.result.stopped
    assert torch.equal(tiny(STEPS), native)


def test_a_pass_that_ends_between_blocks_serves_no_other_model(bystander: Any) -> None:
    """And the next pass works where offloading was put over what is left of it, and was taken
    away."""
    accelerate = pytest.importorskip("accelerate")
    tiny = ALL["Wan 2.1"]()
    native, model = tiny(STEPS), tiny.pipe.transformer
    with enable(tiny.pipe, "manual", **SETTINGS) as handle:
        expected = tiny(STEPS)
        calls = calls_of(handle)
        with ended_in(model.norm_out, 3, KeyboardInterrupt):
            tiny(STEPS)
        bystander(handle)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
        for _ in range(2):
            assert torch.equal(tiny(STEPS), expected) and calls_of(handle) == calls
        accelerate.hooks.remove_hook_from_submodules(model)
        assert torch.equal(tiny(STEPS), expected) and calls_of(handle) == calls
        with ended_in(model.norm_out, 3, KeyboardInterrupt):
            tiny(STEPS)
    assert torch.equal(tiny(STEPS), native)


def test_offloading_that_was_there_before_may_go() -> None:
    accelerate = pytest.importorskip("accelerate")
    tiny = ALL["Wan 2.1"]()
    model = tiny.pipe.transformer
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    with enable(tiny.pipe, "manual", **SETTINGS) as handle:
        expected = tiny(STEPS)
        calls = calls_of(handle)
        accelerate.hooks.remove_hook_from_submodules(model)
        assert torch.equal(tiny(STEPS), expected) and calls_of(handle) == calls


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_is_not_traced_anew_in_each_pass() -> None:
    tiny = ALL["Wan 2.1"]()
    by_block(tiny.pipe.transformer)
    with enable(tiny.pipe, "manual", **SETTINGS):
        tiny(1)
        frames = torch._dynamo.utils.counters["frames"]
        traced = frames["total"]
        tiny(1)
        assert frames["total"] == traced > 0

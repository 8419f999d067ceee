# SPDX-License-Identifier: Apache-2.0
"""Passes of diffusers' transformers beside another thread, which disables, enables or runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.needed import REASON

pytest.importorskip("diffusers", reason=REASON)
pytest.importorskip("transformers", reason=REASON)

from benchmarks.metrics import rel_l2
from sparge.integrations.diffusers import Handle, enable
from tests.tiny_models.pipelines import ALL, drawn, flow

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

MANUAL: dict[str, Any] = {"mode": "manual", "topk": 1.0, "min_tokens": 100, "start_percent": 0.0}
EIGHT_BIT = 0.03


@contextmanager
def at_call(part: nn.Module, number: int, act: Callable[[], Any]) -> Iterator[None]:
    """Context in which act() runs before that call of a part, the first being 1."""
    left = [number]

    def count(module: Any, args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            act()

    hook = part.register_forward_pre_hook(count)
    yield
    hook.remove()


def in_a_thread(act: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    return run


@pytest.mark.parametrize("thread", [in_a_thread, lambda act: act], ids=["another", "the same"])
@pytest.mark.parametrize("again", [False, True], ids=["disable", "a second enable"])
def test_a_handle_that_is_replaced_while_a_block_runs(again: bool, thread: Any) -> None:
    """The pass goes on natively. The next one is the second handle's."""
    tiny, handles = ALL["Wan 2.1"](), []
    native = tiny(2)
    first = enable(tiny.pipe, **MANUAL)

    def act() -> None:
        if again:
            handles.append(enable(tiny.pipe, **MANUAL))
        else:
            first.disable()

    attention = tiny.pipe.transformer.blocks[1].attn1
    with at_call(attention, 3, thread(act)):  # in the second step, with the prompt
        out = tiny(2)
    assert 0 < rel_l2(out, native) < EIGHT_BIT
    assert first.result is not None and first.result.counts.sparse == 5
    assert first.models == []
    for second in handles:
        assert second.result is not None and second.result.counts.sparse == 2
        tiny(2)
        assert second.result.counts.sparse == 8
        second.disable()
    assert torch.equal(tiny(2), native)
    assert not any("forward" in vars(part) for part in tiny.pipe.transformer.modules())


def passes(model: Any, pipe: Any, seed: int) -> Tensor:
    """Results of both steps of a loop around a transformer."""
    hidden = drawn(1, 4, 5, 16, 24, seed=seed)
    given = {"encoder_hidden_states": drawn(1, 26, 32, seed=2), "return_dict": False}
    with torch.no_grad():
        return torch.stack([
            model(hidden, timestep=t.expand(1), **given)[0] for t in pipe.scheduler.timesteps
        ])  # fmt: skip


def test_a_model_that_two_threads_run_serves_one_and_says_so() -> None:
    model = ALL["Wan 2.1"]().pipe.transformer
    pipe, others = SimpleNamespace(transformer=model, scheduler=flow()), []
    pipe.scheduler.set_timesteps(2)
    native = [passes(model, pipe, seed) for seed in (1, 2)]

    def ends_in_a_block() -> None:
        with at_call(model.blocks[0].attn1, 1, lambda: 1 / 0), pytest.raises(ZeroDivisionError):
            passes(model, pipe, 2)

    def other() -> None:
        others.append(passes(model, pipe, 2))
        ends_in_a_block()

    with enable(pipe, **MANUAL) as handle:
        with at_call(model.blocks[1].attn1, 1, in_a_thread(other)):
            out = passes(model, pipe, 1)
        assert torch.equal(others[0], native[1]) and said(handle)
        assert 0 < rel_l2(out, native[0]) < EIGHT_BIT
        assert handle.result is not None and handle.result.counts.sparse == 4
        in_a_thread(lambda: others.append(passes(model, pipe, 2)))()
        assert 0 < rel_l2(others[1], native[1]) < EIGHT_BIT and not said(handle)
    assert torch.equal(passes(model, pipe, 1), native[0])


def said(handle: Handle) -> bool:
    return "another thread ran the model" in handle.line

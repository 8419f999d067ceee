# SPDX-License-Identifier: Apache-2.0
"""Arguments of `enable` for pipelines of diffusers, and transformers that are copied, trained, or
enabled, disabled and run by another thread while they are enabled."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import sparge
from benchmarks.metrics import rel_l2
from sparge.integrations.diffusers import Handle, enable
from sparge.reasons import Reason
from tests.tiny_models.pipelines import ALL, TEXT, WIDTH, drawn, flow

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

TINY: dict[str, Any] = {"topk": 0.5, "min_tokens": 100, "start_percent": 0.0}
MANUAL: dict[str, Any] = TINY | {"mode": "manual", "topk": 1.0}
EIGHT_BIT = 0.03


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mode": "auto"}, "mode is 'auto'; it takes one of"),
        ({"mode": "fast"}, 'a quality goes by its name: quality="fast"'),
        ({"mode": "auto quality", "topk": 0.2}, 'mode "auto quality" takes quality, mode "auto b'),
        ({"quality": "fast", "topk": 0.2}, 'quality and topk given with mode "auto quality"'),
        ({"quality": 3}, "quality is 3; it takes one of .*'fast'], or a mean error from 0 to 1"),
        ({"mode": 0.3}, "policy is 0.3; give a SparsePolicy"),
        ({"mode": sparge.SparsePolicy}, "policy is the class SparsePolicy; give a SparsePolicy"),
        ({"mode": abs, "policy": sparge.SparsePolicy()}, "policy is given twice"),
        ({"mode": "manual", "quality": "fast"}, 'mode "manual" takes topk or policy'),
        ({"mode": "auto budget", "policy": abs}, 'policy given with mode "auto budget"'),
        ({"mode": "manual", "policy": 0.3}, "policy is 0.3; give a SparsePolicy"),
        (
            {"mode": "manual", "policy": sparge.SparsePolicy(), "topk": 0.2},
            "topk and policy given with mode",
        ),
        ({"min_tokens": -1}, "min_tokens is .*; it takes"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, Any], sentence: str) -> None:
    pipe = SimpleNamespace(transformer=nn.Identity(), scheduler=flow())
    with pytest.raises(ValueError, match=sentence):
        enable(pipe, **given)
    assert not pipe.transformer._forward_hooks


def test_a_pipeline_without_a_transformer_is_refused() -> None:
    with pytest.raises(ValueError, match="SimpleNamespace has no transformer and scheduler"):
        enable(SimpleNamespace(unet=nn.Identity()))


def calls_of(handle: Handle) -> int:
    assert handle.stats is not None and handle.stats.counts.sparse
    return handle.stats.counts.sparse


@pytest.mark.parametrize(
    ("given", "aim"),
    [
        ({"quality": 0.2}, "a mean error of 0.2"),
        ({"topk": 0.3}, "a mean density of 30 %"),
        ({"policy": sparge.SparsePolicy()}, "None"),
    ],
)
def test_the_mode_follows_from_what_is_given(given: dict[str, Any], aim: str) -> None:
    tiny = ALL["Wan 2.1"]()
    with enable(tiny.pipe, **given, min_tokens=100) as handle:
        tiny(1)
    assert handle.stats is not None and str(handle.stats.aim) == aim


def test_a_rule_says_what_is_kept_of_each_call() -> None:
    """Steps and text are the session's; errors of the rule are the caller's."""
    tiny, seen, given = ALL["CogVideoX"](), [], {"min_tokens": 100, "start_percent": 0.5}
    native, grid = tiny(2), sparge.TokenGrid(*tiny.grid, prefix=TEXT)
    tokens = grid.tokens
    nothing = torch.zeros(2, 2, -(-tokens // 128), -(-tokens // 64), dtype=torch.bool)

    def rule(call: sparge.TorchCall) -> Any:
        seen.append((call.layer, call.grid))
        return {"block_mask": nothing} if call.layer else None

    with enable(tiny.pipe, rule, **given) as handle:
        tiny(2)
    assert seen == [(0, grid), (1, grid)] and (stats := handle.stats) is not None
    assert (stats.sparse_calls, stats.dense_calls) == (1, 3)
    assert stats.reasons[Reason("the rule of the caller keeps it exact")] == 1
    of_text = 128 * tokens + (tokens - 128) * 64  # the first block of queries, and of keys
    assert stats.density == pytest.approx(of_text / tokens**2)
    wrong: Any
    for wrong in (lambda call: 1 / 0, lambda call: {"block_mask": nothing[:1]}):
        with enable(tiny.pipe, wrong, **given), pytest.raises((ZeroDivisionError, ValueError)):
            tiny(2)
    assert torch.equal(tiny(2), native)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_the_transformer_is_native(make_copy: Any) -> None:
    tiny = ALL["Wan 2.1"]()
    native, model = tiny(2), tiny.pipe.transformer
    with enable(tiny.pipe, "manual", **TINY) as handle:
        sparse = tiny(2)
        calls = calls_of(handle)
        tiny.pipe.transformer = copied = make_copy(model)
        assert copied.cache_context.__self__._named.__self__ is copied
        assert torch.equal(tiny(2), native) and calls_of(handle) == calls
        with enable(tiny.pipe, "manual", **TINY) as of_copy:
            assert torch.equal(tiny(2), sparse) and calls_of(of_copy) == calls
        tiny.pipe.transformer = model
        assert torch.equal(tiny(2), sparse)
    assert torch.equal(tiny(2), native)


@pytest.mark.parametrize("mode", ["manual", "auto budget"])
def test_a_pass_with_gradients_is_native_and_measures_nothing(mode: str) -> None:
    """Checkpointing then finds the tensors of the first run of a block in the second one."""
    tiny = ALL["Wan 2.1"]()
    model = tiny.pipe.transformer.train()
    model.enable_gradient_checkpointing()
    tiny.pipe.scheduler.set_timesteps(2)
    latents, text = drawn(1, 4, 5, 16, 24, seed=1), drawn(1, TEXT, WIDTH, seed=2)
    weight = model.blocks[0].attn1.to_q.weight
    gradients = []
    for timestep in tiny.pipe.scheduler.timesteps:
        given = {"timestep": timestep.expand(1), "encoder_hidden_states": text}
        for enabled in (False, True):
            handle = enable(tiny.pipe, mode, **TINY) if enabled else None
            model(latents, **given).sample.float().square().sum().backward()
            gradients.append(weight.grad)
            weight.grad = None
            if handle is not None:
                result = handle.stats
                assert result is not None and not result.counts.sparse and not result.notes
                assert "no backward pass" in next(iter(result.counts.reasons))
                handle.disable()
        assert torch.equal(*gradients[-2:]) and gradients[-1].abs().sum() > 0


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
    assert first.stats is not None and first.stats.counts.sparse == 5
    assert first.models == []
    for second in handles:
        assert second.stats is not None and second.stats.counts.sparse == 2
        tiny(2)
        assert second.stats.counts.sparse == 8
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
        assert handle.stats is not None and handle.stats.counts.sparse == 4
        in_a_thread(lambda: others.append(passes(model, pipe, 2)))()
        assert 0 < rel_l2(others[1], native[1]) < EIGHT_BIT and not said(handle)
    assert torch.equal(passes(model, pipe, 1), native[0])


def said(handle: Handle) -> bool:
    return "another thread ran the model" in handle.line

# SPDX-License-Identifier: Apache-2.0
"""Pipelines of diffusers with sparse attention: tiny ones with random weights, on the CPU."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")
pytest.importorskip("transformers")


import sparge
from benchmarks.metrics import rel_l2
from sparge.integrations.diffusers import enable
from sparge.kernels.warmup import KERNEL_DID_NOT_COMPILE
from sparge.session import MASK, Pass, Session
from sparge.session.heads import MEASURING
from tests.tiny_models import pipelines
from tests.tiny_models.pipelines import ALL, TEXT, drawn

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

diffusers: Any = sys.modules["diffusers"]  # its parts are found when they are asked for

diffusers.logging.set_verbosity_error()
#: Settings with which tiny calls may be sparse.
TINY: dict[str, Any] = {"min_tokens": 100, "start_percent": 0.0}
#: Relative error of latents after a few steps where everything is kept in 8 bits.
EIGHT_BIT = 0.03
STEPS = 3
#: Self-attention calls of the clip in one step, with the negative prompt.
CALLS = {
    "CogVideoX": 2, "CogVideoX 1.5": 2, "Mochi": 4, "Wan 2.1": 4, "Wan 2.2": 4, "HunyuanVideo": 4,
    "LTX": 2, "Flux": 4, "SD3.5": 3, "Allegro": 2,
}  # fmt: skip
IN_ONE_BATCH = {"CogVideoX", "CogVideoX 1.5", "Mochi", "LTX", "SD3.5", "Allegro"}

every = pytest.mark.parametrize("name", ALL)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps of the passes that runs began, and their layouts."""
    meet, seen = Session.meet, []

    def watched(session: Session, begun: Pass) -> str | None:
        seen.append(SimpleNamespace(step=begun.step, layout=begun.layout))
        return meet(session, begun)

    monkeypatch.setattr(Session, "meet", watched)
    return seen


@every
def test_all_kept_is_native_to_8_bits_and_disabled_it_is_native(name: str) -> None:
    tiny = ALL[name]()
    native = tiny(2)
    handle = enable(tiny.pipe, "manual", topk=1.0, **TINY)
    got, calls = tiny(2), 2 * CALLS[name]
    assert 0 < rel_l2(got, native) < EIGHT_BIT
    assert handle.stats is not None and handle.stats.counts.sparse == calls
    assert handle.stats.counts.dense == 0 and handle.stats.notes == ()
    said = f"{calls} of {calls} calls were sparse; 100 % of attention computed"
    assert handle.line == said
    handle.disable()
    assert torch.equal(tiny(2), native), "as if nothing had been there"


@every
def test_text_is_exact_where_it_stands_and_the_clip_has_its_grid(
    name: str, served: list[Any], passes: list[Any]
) -> None:
    """Text is where queries of the first block change with the prompt."""
    tiny = ALL[name]()
    with enable(tiny.pipe, "manual", topk=0.5, dense_blocks="1", **TINY):
        tiny(2)
        call = int(name == "Mochi")  # which calls for the negative prompt first
        first, calls = served[call], len(served)
        tiny(2, prompt_embeds=drawn(1, TEXT, pipelines.WIDTH, seed=9))
    other = served[calls + call].q
    changed = (first.q != other).any(-1).any(1)[-1]  # of a batch the last is the positive prompt
    before, after = tiny.text
    expected = torch.zeros_like(changed)
    expected[:before] = True
    expected[len(expected) - after :] = after > 0
    assert torch.equal(changed, expected), "the prompt's own tokens"
    (grid,) = {each.layout.grid for each in passes}
    assert grid == tiny.grid
    assert (first.policy.exact_prefix, first.policy.exact_suffix) == (before, after)
    assert first.order is not None and first.order.tokens == first.q.shape[2]


@every
def test_prompts_and_steps_are_numbered(name: str, passes: list[Any]) -> None:
    tiny, texts = ALL[name](), []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        texts.append(kwargs["encoder_hidden_states"])

    for model in tiny.transformers:
        model.register_forward_pre_hook(look, with_kwargs=True)
    with enable(tiny.pipe, "manual", min_tokens=1 << 20, start_percent=0.34):
        tiny(STEPS)
    in_batch, (prompt,) = name in IN_ONE_BATCH, tiny.given["prompt_embeds"]
    assert len(passes) == len(texts) == (STEPS if in_batch else 2 * STEPS)
    for each, text in zip(passes, texts, strict=True):
        positive = [torch.equal(entry.view(TEXT, -1), prompt) for entry in text]
        assert [number == 0 for number in each.step.prompts] == positive
    steps = [each.step for each in passes]
    a_step = 1 if in_batch else 2
    assert [each.number for each in steps] == [x for x in range(STEPS) for _ in range(a_step)]
    dense = [each.why_dense is not None for each in steps]
    assert dense == [each.number < 2 for each in steps], "a third of three steps, and the next one"
    assert [each.is_last_dense for each in steps] == [each.number == 1 for each in steps]


@pytest.mark.parametrize("name", ["HunyuanVideo", "SD3.5"])
def test_a_budget_is_kept_by_measured_heads(name: str) -> None:
    tiny = ALL[name]()
    with enable(tiny.pipe, "auto budget", topk=0.5, min_tokens=100, start_percent=0.25) as handle:
        tiny(4)
    result = handle.stats
    assert result is not None and result.counts.sparse == 3 * CALLS[name]
    assert result.densities.of_sparse_calls == pytest.approx(0.5, abs=0.06)
    assert result.error is not None and 0.01 < result.error < 0.5
    by_step = result.densities.by_step.nanmean(0)
    assert by_step[0] == 1 and (by_step[1:] < 0.7).all()
    assert "off by" in handle.line and "Density by step, %: 100" in handle.report()


def test_both_transformers_of_wan_2_2_are_measured_apart(passes: list[Any]) -> None:
    tiny = ALL["Wan 2.2"]()
    with enable(tiny.pipe, "auto budget", topk=0.5, min_tokens=100, start_percent=0.2) as handle:
        tiny(6)
    models = [each.step.model for each in passes]
    assert models == sorted(models) and models.count(0) == models.count(1) == 6
    result = handle.stats
    assert result is not None and len(result.heads) == 2
    assert result.counts.reasons[MEASURING] == CALLS["Wan 2.2"], "one step of the second one"
    assert result.counts.sparse == 3 * CALLS["Wan 2.2"]


def test_a_call_of_the_pipeline_is_a_run_and_repeats_its_bits() -> None:
    tiny = ALL["Wan 2.1"]()
    with enable(tiny.pipe, "auto budget", topk=0.5, min_tokens=100) as handle:
        assert "has not run" in handle.line and handle.stats is None
        first = tiny(3)
        one = handle.stats
        assert torch.equal(tiny(3), first)
        again = handle.stats
        assert one is not None and again is not None and one.counts is not again.counts
        assert one.counts.sparse == again.counts.sparse and not again.stopped
        tiny(3, guidance=1.0)
        alone = handle.stats
        assert alone is not None and 2 * alone.counts.calls == one.counts.calls


def test_an_error_of_ours_costs_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ALL["CogVideoX"]()
    native = tiny(2)

    def fail(*_: Any, **__: Any) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr("sparge.integrations.diffusers.handle.layout_of", fail)
    with enable(tiny.pipe, "manual", **TINY) as handle:
        assert torch.equal(tiny(2), native)
    assert "an error of Sparge Attention" in handle.line


def test_a_second_enable_replaces_the_first() -> None:
    tiny = ALL["Wan 2.1"]()
    first = enable(tiny.pipe, "manual", topk=0.2, **TINY)
    model = tiny.pipe.transformer
    tiny.pipe.transformer = nn.Identity()
    assert first.line == first.report() and "call enable again" in first.line
    tiny.pipe.transformer = torch.compile(model)
    assert "has not run" in first.line
    tiny.pipe.transformer = model
    second = enable(tiny.pipe, "manual", policy=sparge.SparsePolicy(topk=0.5), **TINY)
    tiny(1)
    assert first.stats is None and first.models == []
    assert second.stats is not None
    assert second.stats.densities.of_sparse_calls == pytest.approx(0.5, abs=0.1)
    first.disable()
    second.disable()
    assert not tiny.pipe.transformer._forward_hooks


def test_a_pipeline_that_is_dropped_is_freed() -> None:
    tiny = ALL["Wan 2.1"]()
    enable(tiny.pipe, "manual", **TINY)
    tiny(1)
    model = weakref.ref(tiny.pipe.transformer)
    del tiny
    gc.collect()
    assert model() is None


def test_a_run_waits_for_the_kernels_and_is_native_without(monkeypatch) -> None:
    tiny, ready = ALL["Wan 2.1"](), SimpleNamespace(usable=True, arch="", note="")
    native = tiny(1)
    waited = SimpleNamespace(wait=lambda check: KERNEL_DID_NOT_COMPILE)
    module, asked = "sparge.session.session", []
    monkeypatch.setattr(f"{module}.capabilities", lambda device: ready)
    monkeypatch.setattr(f"{module}.warm_up", lambda *args: asked.append(args[2]) or waited)
    with enable(tiny.pipe, "manual", **TINY) as handle:
        assert torch.equal(tiny(1), native)
    assert asked == [(64, torch.bfloat16)], "what the model needs"
    assert handle.line == f"Nothing skipped; {KERNEL_DID_NOT_COMPILE}"


def test_own_loops_second_order_and_masks_of_heads(passes: list[Any]) -> None:
    """A loop around a transformer, with a scheduler that evaluates it twice a step, and Allegro's
    mask, which is added and repeated for each head."""
    tiny = ALL["Allegro"]()
    scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
    pipe = SimpleNamespace(transformer=tiny.pipe.transformer, scheduler=scheduler)
    scheduler.set_timesteps(3)
    hidden = drawn(1, 4, 5, 16, 24, seed=1)
    given = {
        "encoder_hidden_states": drawn(1, TEXT, pipelines.WIDTH, seed=2),
        "encoder_attention_mask": pipelines.mask(TEXT),
        "image_rotary_emb": tiny.pipe._prepare_rotary_positional_embeddings(1, 128, 192, 5, "cpu"),
        "attention_mask": torch.ones(1, 5, 16, 24),
    }
    with enable(pipe, "manual", topk=0.5, **TINY) as handle, torch.inference_mode():
        for t in scheduler.timesteps:
            pipe.transformer(hidden, timestep=t.expand(1), **given)
    assert [each.step.number for each in passes] == [0, 1, 2, 3, 4]
    assert handle.stats is not None and not handle.stats.stopped
    assert handle.stats.counts.sparse == 2 * 5 and not handle.stats.counts.reasons


def test_offloaded_and_replaced_modules_do_not_matter() -> None:
    accelerate = pytest.importorskip("accelerate")

    tiny = ALL["Wan 2.1"]()
    with enable(tiny.pipe, "manual", topk=0.5, **TINY) as handle:
        plain = tiny(2)
        model = tiny.pipe.transformer
        attention = model.blocks[0].attn1
        attention.to_q = nn.Sequential(attention.to_q, nn.Linear(128, 128).bfloat16())
        adapted = tiny(2)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
        assert attention.to_q[1].weight.is_meta
        assert torch.equal(tiny(2), adapted) and not torch.equal(adapted, plain)
        assert handle.stats is not None and handle.stats.counts.sparse == 2 * CALLS["Wan 2.1"]


def test_a_ring_of_gpus_is_native_and_the_line_says_what_serves_it() -> None:
    tiny = ALL["Flux"]()
    native = tiny(2)
    config = SimpleNamespace(ring_degree=2, ulysses_degree=2)
    tiny.pipe.transformer._parallel_config = SimpleNamespace(context_parallel_config=config)
    with enable(tiny.pipe, "auto budget", topk=0.3, **TINY) as handle:
        assert torch.equal(tiny(2), native)
    assert handle.stats is not None and handle.stats.counts.sparse == 0
    assert "in a ring: take ulysses_degree" in handle.line


def test_masked_calls_of_several_gpus_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tokens stand in several places there. Another process is pretended."""
    monkeypatch.setattr("sparge.integrations.diffusers.handle.ranks_of", lambda model: (2, None))
    tiny = ALL["HunyuanVideo"]()
    with enable(tiny.pipe, "manual", topk=0.3, **TINY) as handle:
        tiny(1)
    assert handle.stats is not None and handle.stats.counts.sparse == 0
    assert handle.stats.counts.reasons[MASK] == CALLS["HunyuanVideo"]

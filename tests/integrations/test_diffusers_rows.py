# SPDX-License-Identifier: Apache-2.0
"""Rows of the integration with diffusers: tiny transformers, called as their pipelines do."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import sparge
from benchmarks.metrics import rel_l2
from sparge.integrations.diffusers import enable
from sparge.integrations.diffusers.layout import ROWS
from sparge.reasons import Reason
from sparge.sdpa import AttentionMode
from tests.tiny_models.pipelines import ALL, TEXT, WIDTH, diffusers, drawn, flow, mask
from tests.tiny_models.transformers import TRANSFORMERS

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

EIGHT_BIT, PROMPTS = 0.03, (5, 6)


def test_each_row_has_a_tiny_model_and_a_line_in_the_table() -> None:
    table = (Path(__file__).parents[2] / "docs/hosts/diffusers.md").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^\| ([^|]+) \| `(\w+)` \|", table, re.MULTILINE))
    assert lines == {row.name: kind for kind, row in ROWS.items()}
    pipelines = {re.sub(r"[ .].*", "", name) for name in ALL}
    assert {*lines} == {*TRANSFORMERS, *pipelines}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_row_is_what_the_model_does(name: str, served: list[Any]) -> None:
    """Text is where queries change with the prompt; all attention is counted, and kept it is native
    to 8 bits."""
    tiny, calls = TRANSFORMERS[name](), []
    assert ROWS[type(tiny.model).__name__].name == name
    pipe = SimpleNamespace(transformer=tiny.model, scheduler=flow())
    pipe.scheduler.set_timesteps(1)
    with torch.no_grad():
        with AttentionMode(lambda *_, **__: calls.append(1)):
            native = [tiny(seed) for seed in PROMPTS]
        with enable(pipe, "manual", topk=1.0, min_tokens=100, start_percent=0.0) as handle:
            outs = [tiny(seed) for seed in PROMPTS]
    assert all(0 < rel_l2(*pair) < EIGHT_BIT for pair in zip(outs, native, strict=True))
    result = handle.stats
    assert result is not None and result.notes == () and result.counts.sparse == 2 * tiny.sparse
    counted = result.counts.sparse + result.counts.dense + result.counts.cross
    assert counted == len(calls) - 2 * tiny.beside

    before, after = tiny.text
    grid = sparge.TokenGrid(*tiny.grid, prefix=before, suffix=after, tail=tiny.tail)
    whole = [each for each in served if each.q.shape[2] == grid.tokens]
    first, other = whole[0], whole[len(whole) // 2]
    changed = (first.q != other.q).any(-1).any(1)[0]
    text = [changed[:before], changed[grid.tokens - after :]]
    assert [part.any() for part in text] == [before > 0, after > 0]
    assert sum(part.sum() for part in text) == changed.sum()
    assert (first.policy.exact_prefix, first.policy.exact_suffix) == (before, after)
    assert torch.equal(first.order.slot_tokens[0], sparge.grid_order(grid).slot_tokens[0])


PROMPT = drawn(1, TEXT, WIDTH, seed=3)
#: Pipelines of those models, and what they are given beside the prompt.
PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "Flux 2": ("Flux2KleinPipeline", {"guidance_scale": 1.0}),
    "Chroma": ("ChromaPipeline", {"prompt_attention_mask": mask(19), "guidance_scale": 1.0}),
    "Qwen-Image": ("QwenImagePipeline", {"prompt_embeds_mask": mask(19), "true_cfg_scale": 1.0}),
    "Z-Image": ("ZImagePipeline", {"prompt_embeds": [PROMPT[0]], "guidance_scale": 0}),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_give_what_a_row_reads(name: str, served: list[Any]) -> None:
    """Picture and step among it: half of the steps are dense, where that is asked."""
    kind, given = PIPELINES[name]
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    model = TRANSFORMERS[name]().model
    pipe = getattr(diffusers, kind)(transformer=model, scheduler=flow(), **parts)
    pipe.vae_scale_factor = 8
    facts = SimpleNamespace(batch_norm_eps=1e-5)  # for which Flux 2 asks
    vars(pipe)["vae"] = SimpleNamespace(bn=torch.nn.BatchNorm2d(16), config=facts)
    pipe.set_progress_bar_config(disable=True)
    handle = enable(pipe, "manual", topk=0.3, min_tokens=100, start_percent=0.5)
    with handle, torch.inference_mode():
        given = {"prompt_embeds": PROMPT, "num_inference_steps": 4, "output_type": "latent"} | given
        pipe(height=240, width=320, **given)
    assert handle.stats is not None and handle.stats.notes == ()
    counts = handle.stats.counts
    assert counts.sparse > 0 and counts.reasons[Reason("before start_percent 0.5")] == counts.sparse
    assert all(each.order is not None and each.order.tokens >= 15 * 20 for each in served)

# SPDX-License-Identifier: Apache-2.0
"""Transformers of diffusers that have no row: their steps, what the line says, and that all their
self-attention is counted, wherever in the model it stands."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("diffusers")

from sparge.integrations.diffusers import enable
from sparge.integrations.diffusers.steps import COND, Steps
from sparge.sdpa import AttentionMode
from tests.tiny_models.pipelines import drawn, flow

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

LEAST, STEPS = 64, 4


def test_inputs_without_the_usual_names_are_said_once() -> None:
    class Renamed(torch.nn.Module):
        def forward(self, picture: torch.Tensor) -> torch.Tensor:
            return picture

    model = Renamed()
    pipe = type("Pipeline", (), {"transformer": model, "scheduler": object()})()
    with enable(pipe, "manual") as handle:
        model(torch.zeros(1))
    assert handle.line.startswith("Nothing skipped; Renamed is not known here")


class OneBlock(nn.Module):
    """Transformer whose block is a function of its latent and its text."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([nn.Identity()])
        self.transformer_blocks[0].forward = attend

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:
        return self.transformer_blocks[0](hidden_states, encoder_hidden_states)


def test_a_model_with_cross_attention_alone_says_so() -> None:
    model = OneBlock(lambda x, text: functional.scaled_dot_product_attention(x, text, text))
    pipe = SimpleNamespace(transformer=model, scheduler=flow())
    pipe.scheduler.set_timesteps(1)
    with enable(pipe, "manual", min_tokens=LEAST, start_percent=0.0) as handle:
        model(torch.randn(1, 2, 320, 64), pipe.scheduler.timesteps, torch.randn(1, 1, 9, 64))
    assert handle.stats is not None and handle.stats.counts.cross == 1
    assert handle.line == "Nothing skipped; all attention calls were cross-attention"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["t", "t / 1000", "1 - t / 1000"])
@pytest.mark.parametrize("end", [20, 1])
def test_steps_of_a_model_without_a_row(end: int, form: str, dtype: torch.dtype) -> None:
    timesteps = torch.linspace(1000, end, 12)
    given = {"t": timesteps, "t / 1000": timesteps / 1000, "1 - t / 1000": 1 - timesteps / 1000}
    steps = Steps(timesteps)
    for number, timestep in enumerate(given[form].to(dtype)):
        assert steps.advance(timestep[None], COND) and steps.now == number
    assert steps.is_last and steps.unknown is None
    only = Steps(timesteps[:1])
    assert only.advance(given[form][:1].to(dtype), COND) and only.is_last
    unknown = Steps(timesteps)
    assert unknown.advance(torch.tensor([-70.0]), COND) and unknown.unknown


def test_steps_of_cosmos_predict_2() -> None:
    """bfloat16 has the same timestep for neighbours among the first steps."""
    sigmas = torch.linspace(80 ** (1 / 7), 0.002 ** (1 / 7), 35) ** 7
    steps = Steps(1000 * sigmas)
    for number, timestep in enumerate((sigmas / (sigmas + 1)).bfloat16()):
        assert steps.advance(timestep[None], COND) and abs(steps.now - number) <= 1
    assert steps.is_last


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


class Parts(nn.Module):
    """Long and short attention in no list, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([Attention()])
        self.pooling, self.norm = nn.Sequential(nn.Identity(), Attention()), nn.LayerNorm(64)

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        short = self.pooling(hidden_states[:, :, : LEAST - 1])
        x = self.norm(self.pooling(hidden_states)) + short.mean()
        return self.transformer_blocks[0](x)


def loop(pipe: Any) -> None:
    for t in pipe.scheduler.timesteps:
        pipe.transformer(drawn(1, 2, 200, 64, seed=1), t[None].bfloat16() / 1000)


def test_sparse_and_dense_calls_are_those_that_came() -> None:
    pipe = SimpleNamespace(transformer=Parts().bfloat16(), scheduler=flow())
    pipe.scheduler.set_timesteps(STEPS)
    seen: list[int] = []
    with torch.no_grad():
        with AttentionMode(lambda query, *_: seen.append(query.shape[2])):
            loop(pipe)
        with enable(pipe, "manual", topk=0.3, min_tokens=LEAST, start_percent=0.0) as handle:
            loop(pipe)
    assert handle.stats is not None
    counts, seen = handle.stats.counts, [tokens for tokens in seen if tokens >= LEAST]
    assert counts.sparse + counts.dense == len(seen) and counts.dense == STEPS
    assert handle.line.startswith(f"{counts.sparse} of {len(seen)} calls were sparse")


def test_a_controlnet_that_is_not_served_is_told() -> None:
    model = Parts().bfloat16()
    pipe = SimpleNamespace(transformer=model, scheduler=flow(), controlnet=nn.Identity())
    pipe.scheduler.set_timesteps(1)
    with enable(pipe, "manual", min_tokens=LEAST, start_percent=0.0) as handle:
        loop(pipe)
    assert "the attention of the pipeline's controlnet is native, and not counted" in handle.line


def test_a_scheduler_without_timesteps_leaves_it_dense() -> None:
    model = OneBlock(lambda x, text: functional.scaled_dot_product_attention(x, x, x))
    pipe, latent = SimpleNamespace(transformer=model, scheduler=flow()), torch.randn(1, 2, 200, 64)
    with enable(pipe, "manual", min_tokens=LEAST, start_percent=0.0) as handle:
        pipe.scheduler.timesteps = None
        for _ in range(2):
            model(latent, torch.ones(1))
        assert handle.stats is not None and handle.stats.counts.dense == 2
        assert handle.line.startswith("Nothing skipped; the scheduler has no timesteps")
        pipe.scheduler.timesteps = torch.tensor([1000.0])
        model(latent, pipe.scheduler.timesteps)
    assert handle.stats is not None and handle.stats.counts.sparse == 1
    assert "OneBlock is not known here" in handle.line

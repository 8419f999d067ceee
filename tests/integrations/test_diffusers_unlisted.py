# SPDX-License-Identifier: Apache-2.0
"""Pipelines of diffusers whose transformers have no row: their steps, and what the line says."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.needed import REASON

pytest.importorskip("diffusers", reason=REASON)

from sparge.integrations.diffusers import Handle, enable
from sparge.integrations.diffusers.steps import COND, Steps

diffusers: Any = sys.modules["diffusers"]  # its parts are found when they are asked for

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

STEPS, WIDTH = 4, 32
SIZE: dict[str, Any] = {"height": 320, "width": 320, "num_inference_steps": STEPS}


def without(kind: Any, transformer: Any) -> Any:
    """Pipeline of a kind with this transformer and without text encoder and VAE."""
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = kind(transformer=transformer.bfloat16().eval(), scheduler=scheduler, **parts)
    pipe.vae_scale_factor = 8
    pipe.set_progress_bar_config(disable=True)
    return pipe


def qwen_image() -> tuple[Any, dict[str, Any]]:
    """It is given a thousandth of the scheduler's timesteps."""
    model = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=1, attention_head_dim=64, num_attention_heads=2,
        joint_attention_dim=WIDTH, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    prompt = torch.randn(1, 20, WIDTH).bfloat16()
    mask = torch.ones(1, 20, dtype=torch.int64)
    given = {"prompt_embeds": prompt, "prompt_embeds_mask": mask, "true_cfg_scale": 1.0}
    return without(diffusers.QwenImagePipeline, model), given


def z_image() -> tuple[Any, dict[str, Any]]:
    """Its latents are a list `x`, and its timesteps `t` rise from 0 to 1."""
    model = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=128, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        cap_feat_dim=WIDTH, axes_dims=[16, 24, 24], axes_lens=[256, 256, 256],
    )  # fmt: skip
    prompt = [torch.randn(20, WIDTH).bfloat16()]
    return without(diffusers.ZImagePipeline, model), {"prompt_embeds": prompt, "guidance_scale": 0}


def run(pipe: Any, given: dict[str, Any], **settings: Any) -> Handle:
    handle = enable(pipe, "manual", topk=0.3, min_tokens=100, **settings)
    with handle, torch.inference_mode():
        pipe(output_type="latent", **given, **SIZE)
    return handle


@pytest.mark.parametrize("made", [qwen_image, z_image])
def test_half_of_the_steps_are_dense_where_that_is_asked(made: Any) -> None:
    handle = run(*made(), start_percent=0.5)
    assert handle.result is not None
    counts = handle.result.counts
    early = "before start_percent 0.5"
    assert counts.sparse > 0 and counts.reasons[early] == counts.sparse, counts
    assert "is not known here: its tokens stay in the order they come" in handle.line


def test_timesteps_that_are_not_the_schedulers_leave_it_dense(monkeypatch) -> None:
    pipe, given = qwen_image()
    monkeypatch.setattr("sparge.integrations.diffusers.steps._FORMS", (lambda values: -values,))
    handle = run(pipe, given, start_percent=0.0)
    assert handle.result is not None and handle.result.counts.sparse == 0
    assert "the model is given no timestep of the scheduler" in handle.line


def test_inputs_without_the_usual_names_are_said_once() -> None:
    class Renamed(torch.nn.Module):
        def forward(self, picture: torch.Tensor) -> torch.Tensor:
            return picture

    model = Renamed()
    pipe = type("Pipeline", (), {"transformer": model, "scheduler": object()})()
    with enable(pipe, "manual") as handle:
        model(torch.zeros(1))
    assert handle.line.startswith("NOTHING WAS SPARSE; Renamed is not known here")


def test_a_model_with_cross_attention_alone_says_so() -> None:
    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer_blocks = torch.nn.ModuleList([torch.nn.Identity()])
            self.transformer_blocks[0].forward = self._attend

        def _attend(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, text, text)

        def forward(
            self,
            hidden_states: torch.Tensor,
            timestep: torch.Tensor,
            encoder_hidden_states: torch.Tensor,
        ) -> torch.Tensor:
            return self.transformer_blocks[0](hidden_states, encoder_hidden_states[:, None])

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(1)
    pipe = SimpleNamespace(transformer=Linear(), scheduler=scheduler)
    with enable(pipe, "manual", min_tokens=100) as handle, torch.inference_mode():
        pipe.transformer(torch.randn(1, 2, 320, 64), scheduler.timesteps, torch.randn(1, 9, 64))
    assert handle.result is not None and handle.result.counts.cross == 1
    assert handle.line == "NOTHING WAS SPARSE; all attention calls were cross-attention"


def test_sound_that_attends_to_the_picture_is_exact_as_it_is_short() -> None:
    """LTX-2: 80 tokens of sound, and a clip of 144."""

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer_blocks = torch.nn.ModuleList([torch.nn.Identity()])
            self.transformer_blocks[0].forward = self._attend

        def _attend(self, x: torch.Tensor) -> torch.Tensor:
            sound = x[:, :, :80]
            return torch.cat([
                torch.nn.functional.scaled_dot_product_attention(q, k, k)
                for q, k in ((x, x), (sound, sound), (sound, x), (x, sound))
            ], 2)  # fmt: skip

        def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            return self.transformer_blocks[0](hidden_states)

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(1)
    pipe, given = (
        SimpleNamespace(transformer=Both(), scheduler=scheduler),
        torch.randn(1, 2, 144, 64),
    )
    native = pipe.transformer(given, scheduler.timesteps)
    with enable(pipe, "manual", topk=0.1, min_tokens=100, start_percent=0.0) as handle:
        out = pipe.transformer(given, scheduler.timesteps)
    assert handle.result is not None and handle.result.counts.sparse == 1
    assert torch.equal(out[:, :, 144:], native[:, :, 144:])


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

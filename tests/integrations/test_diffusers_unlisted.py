# SPDX-License-Identifier: Apache-2.0
"""Transformers of diffusers that have no row: their steps, what the line says, and that all their
self-attention is counted, wherever in the model it stands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("diffusers")

from sparge.integrations.diffusers import Handle, enable
from sparge.integrations.diffusers.steps import COND, Steps
from sparge.sdpa import AttentionMode
from tests.tiny_models.pipelines import drawn, flow

diffusers: Any = sys.modules["diffusers"]  # its parts are found when they are asked for

pytestmark = pytest.mark.usefixtures("reference_allowed", "no_mode_left")

LEAST, TEXT, WIDTH, STEPS = 64, 26, 32, 4
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


def once(attend: Callable[..., Tensor], *given: Tensor, topk: float) -> tuple[Handle, Tensor]:
    """Handle and result of one step of a pipeline with such a transformer."""
    pipe = SimpleNamespace(transformer=OneBlock(attend), scheduler=flow())
    pipe.scheduler.set_timesteps(1)
    latent, *text = given
    with enable(pipe, "manual", topk=topk, min_tokens=100, start_percent=0.0) as handle:
        return handle, pipe.transformer(latent, pipe.scheduler.timesteps, *text)


def test_a_model_with_cross_attention_alone_says_so() -> None:
    def attend(x: Tensor, text: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, text[:, None], text[:, None])

    handle, _ = once(attend, torch.randn(1, 2, 320, 64), torch.randn(1, 9, 64), topk=0.3)
    assert handle.result is not None and handle.result.counts.cross == 1
    assert handle.line == "Nothing skipped; all attention calls were cross-attention"


def test_sound_that_attends_to_the_picture_is_exact_as_it_is_short() -> None:
    """LTX-2: 80 tokens of sound, and a clip of 144."""

    def attend(x: Tensor, text: None = None) -> Tensor:
        sound = x[:, :, :80]
        return torch.cat([
            functional.scaled_dot_product_attention(q, k, k)
            for q, k in ((x, x), (sound, sound), (sound, x), (x, sound))
        ], 2)  # fmt: skip

    given = torch.randn(1, 2, 144, 64)
    handle, out = once(attend, given, topk=0.1)
    assert handle.result is not None and handle.result.counts.sparse == 1
    assert torch.equal(out[:, :, 144:], attend(given)[:, :, 144:])


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


def wan_vace() -> tuple[nn.Module, dict[str, Any]]:
    """Its control blocks stand in a list of their own."""
    model = diffusers.WanVACETransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=64, in_channels=4,
        out_channels=4, text_dim=WIDTH, freq_dim=32, ffn_dim=64, num_layers=2,
        rope_max_seq_len=64, vace_layers=[0, 1], vace_in_channels=8,
    )  # fmt: skip
    return model, {
        "hidden_states": drawn(1, 4, 3, 12, 10, seed=1),
        "control_hidden_states": drawn(1, 8, 3, 12, 10, seed=2),
        "encoder_hidden_states": drawn(1, TEXT, WIDTH, seed=3),
    }


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


def own() -> tuple[nn.Module, dict[str, Any]]:
    return Parts(), {"hidden_states": drawn(1, 2, 200, 64, seed=1)}


def loop(model: nn.Module, given: dict[str, Any], pipe: Any) -> None:
    for t in pipe.scheduler.timesteps:
        model(timestep=t[None].bfloat16() / 1000, **given)


@pytest.mark.parametrize(("made", "beside"), [(wan_vace, 0), (own, 1)], ids=["VACE", "own"])
def test_sparse_and_dense_calls_are_those_that_came(
    made: Callable[[], tuple[nn.Module, dict[str, Any]]], beside: int
) -> None:
    torch.manual_seed(0)
    model, given = made()
    pipe = SimpleNamespace(transformer=model.bfloat16().eval(), scheduler=flow())
    pipe.scheduler.set_timesteps(STEPS)
    seen: list[int] = []

    def see(query: Tensor, key: Tensor, *_: Any, **__: Any) -> None:
        if query.shape[2] == key.shape[2] >= LEAST:
            seen.append(query.shape[2])

    with torch.no_grad():
        with AttentionMode(see):
            loop(model, given, pipe)
        with enable(pipe, "manual", topk=0.3, min_tokens=LEAST, start_percent=0.0) as handle:
            loop(model, given, pipe)
    assert handle.result is not None
    counts = handle.result.counts
    assert counts.sparse + counts.dense == len(seen) and counts.dense == beside * STEPS
    assert handle.line.startswith(f"{counts.sparse} of {len(seen)} calls were sparse")


def test_a_controlnet_that_is_not_served_is_told() -> None:
    model, given = own()
    pipe = SimpleNamespace(transformer=model.bfloat16(), scheduler=flow(), controlnet=nn.Identity())
    pipe.scheduler.set_timesteps(1)
    with enable(pipe, "manual", min_tokens=LEAST, start_percent=0.0) as handle:
        loop(model, given, pipe)
    assert "the attention of the pipeline's controlnet is native, and not counted" in handle.line


def test_a_scheduler_without_timesteps_leaves_it_dense() -> None:
    model = OneBlock(lambda x, text: functional.scaled_dot_product_attention(x, x, x))
    pipe, latent = SimpleNamespace(transformer=model, scheduler=flow()), torch.randn(1, 2, 200, 64)
    with enable(pipe, "manual", min_tokens=LEAST, start_percent=0.0) as handle:
        pipe.scheduler.timesteps = None
        for _ in range(2):
            model(latent, torch.ones(1))
        assert handle.result is not None and handle.result.counts.dense == 2
        assert handle.line.startswith("Nothing skipped; the scheduler has no timesteps")
        pipe.scheduler.timesteps = torch.tensor([1000.0])
        model(latent, pipe.scheduler.timesteps)
    assert handle.result is not None and handle.result.counts.sparse == 1
    assert "OneBlock is not known here" in handle.line

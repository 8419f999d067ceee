# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines of diffusers with random weights, and what their calls take. Without text encoder
and VAE: prompts are given as embeddings, and results are latents."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

diffusers: Any = importlib.import_module("diffusers")  # which loads its names when asked

TEXT, WIDTH = 26, 32
#: Tokens of the clips along (time, height, width), and of the pictures.
CLIP, PICTURE = (5, 8, 12), (1, 20, 24)
#: Pixels of a token, of those whose VAE makes a latent of an eighth in patches of two.
PIXELS = 16


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def mask(*real: int) -> Tensor:
    """(entries, TEXT) bool: so many real tokens first."""
    return torch.arange(TEXT) < torch.tensor(real).unsqueeze(1)


@dataclass(frozen=True)
class Tiny:
    """A pipeline, what its call takes beside the number of steps, and its tokens."""

    pipe: Any
    given: dict[str, Any]
    grid: tuple[int, int, int]
    text: tuple[int, int] = (0, 0)
    """Tokens of text before and after the grid, in a self-attention call of the positive prompt."""
    guidance: str = "guidance_scale"

    @property
    def transformers(self) -> list[Any]:
        both = self.pipe.transformer, getattr(self.pipe, "transformer_2", None)
        return [each for each in both if each is not None]

    def __call__(
        self, steps: int = 4, seed: int = 0, guidance: float = 4.0, **given: Any
    ) -> Tensor:
        """Latents of one call."""
        generator = torch.Generator().manual_seed(seed)
        device = self.pipe._execution_device  # to which not every pipeline brings what it is given
        call = {
            name: x.to(device) if isinstance(x, Tensor) else x
            for name, x in (self.given | {self.guidance: guidance} | given).items()
        }
        with torch.inference_mode():
            out = self.pipe(
                num_inference_steps=steps, generator=generator, output_type="latent", **call
            )
        return out[0]


def made(transformer: Callable[..., Any], seed: int = 0, **config: Any) -> Any:
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 2, "attention_head_dim": 64}
    return transformer(**heads | config).bfloat16().eval()


def _piped(
    kind: Any, transformer: Any, scheduler: Any, scales: dict[str, int], **parts: Any
) -> Any:
    encoder = {"tokenizer": None, "text_encoder": None}
    pipe = kind(transformer=transformer, scheduler=scheduler, vae=None, **encoder, **parts)
    for name, scale in scales.items():
        setattr(pipe, name, scale)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _prompts(**more: Any) -> dict[str, Any]:
    negative = drawn(1, TEXT, WIDTH, seed=2)
    return {
        "prompt_embeds": drawn(1, TEXT, WIDTH, seed=1), "negative_prompt_embeds": negative,
    } | more  # fmt: skip


def _pooled() -> dict[str, Any]:
    names = ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    return {name: drawn(1, 32, seed=seed) for seed, name in enumerate(names, 3)}


def _masks(real: int, negative: int) -> dict[str, Tensor]:
    names = ("prompt_attention_mask", "negative_prompt_attention_mask")
    return dict(zip(names, (mask(real), mask(negative)), strict=True))


def _size(frames: int, pixels: int = PIXELS) -> dict[str, int]:
    return {"num_frames": frames, "height": CLIP[1] * pixels, "width": CLIP[2] * pixels}


VIDEO_SCALES = {"vae_scale_factor_temporal": 4, "vae_scale_factor_spatial": 8}
PICTURE_SIZE = {"height": PICTURE[1] * PIXELS, "width": PICTURE[2] * PIXELS}
SECOND_ENCODER = {"tokenizer_2": None, "text_encoder_2": None}


def flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler()


def cogvideox(patch_size_t: int | None = None) -> Tiny:
    rotary = {"use_rotary_positional_embeddings": True, "patch_bias": False}
    later = rotary | {"patch_size_t": patch_size_t} if patch_size_t else {}
    model = made(
        diffusers.CogVideoXTransformer3DModel, in_channels=4, out_channels=4, time_embed_dim=16,
        text_embed_dim=WIDTH, num_layers=2, sample_frames=17, max_text_seq_length=TEXT,
        sample_width=CLIP[2] * 2, sample_height=CLIP[1] * 2, **later,
    )  # fmt: skip
    scheduler = diffusers.CogVideoXDDIMScheduler()
    pipe = _piped(diffusers.CogVideoXPipeline, model, scheduler, VIDEO_SCALES)
    pipe.vae_scaling_factor_image = 1.0
    frames = 17 if not patch_size_t else 4 * (patch_size_t * CLIP[0] - 1) + 1
    return Tiny(pipe, _prompts(max_sequence_length=TEXT, **_size(frames)), CLIP, (TEXT, 0))


def mochi() -> Tiny:
    model = made(
        diffusers.MochiTransformer3DModel, patch_size=2, num_layers=2, pooled_projection_dim=32,
        in_channels=4, text_embed_dim=WIDTH, time_embed_dim=16, max_sequence_length=TEXT,
    )  # fmt: skip
    for weight in model.time_embed.pooler.to_out.parameters():
        weight.data.zero_()  # else the clip's queries change with the prompt from the start
    scales = {"vae_spatial_scale_factor": 8, "vae_temporal_scale_factor": 6}
    pipe = _piped(diffusers.MochiPipeline, model, flow(), scales)
    given = _prompts(**_masks(19, 3), **_size(6 * (CLIP[0] - 1) + 1))
    return Tiny(pipe, given, CLIP, (0, 19))


def _wan_model(seed: int = 0) -> Any:
    return made(
        diffusers.WanTransformer3DModel, seed, patch_size=(1, 2, 2), in_channels=4, out_channels=4,
        text_dim=WIDTH, freq_dim=32, ffn_dim=64, num_layers=2, rope_max_seq_len=64,
    )  # fmt: skip


def wan(second: bool = False) -> Tiny:
    """second: with a transformer for the later half of the steps, as Wan 2.2 has it."""
    parts = {"transformer_2": _wan_model(1), "boundary_ratio": 0.5} if second else {}
    pipe = _piped(diffusers.WanPipeline, _wan_model(), flow(), VIDEO_SCALES, **parts)
    return Tiny(pipe, _prompts(**_size(17)), CLIP)


def hunyuan() -> Tiny:
    model = made(
        diffusers.HunyuanVideoTransformer3DModel, in_channels=4, out_channels=4, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1,
        guidance_embeds=True, text_embed_dim=WIDTH, pooled_projection_dim=32,
        rope_axes_dim=(16, 24, 24),
    )  # fmt: skip
    kind = diffusers.HunyuanVideoPipeline
    pipe = _piped(kind, model, flow(), VIDEO_SCALES, **SECOND_ENCODER)
    given = _prompts(**_masks(19, 7), **_pooled(), **_size(17), negative_prompt="")
    return Tiny(pipe, given, CLIP, (0, 19), guidance="true_cfg_scale")


def ltx() -> Tiny:
    model = made(
        diffusers.LTXVideoTransformer3DModel, in_channels=8, out_channels=8, patch_size=1,
        patch_size_t=1, cross_attention_dim=128, num_layers=2, caption_channels=WIDTH,
    )  # fmt: skip
    scales = {
        "vae_spatial_compression_ratio": 32, "vae_temporal_compression_ratio": 8,
        "transformer_spatial_patch_size": 1, "transformer_temporal_patch_size": 1,
    }  # fmt: skip
    pipe = _piped(diffusers.LTXPipeline, model, flow(), scales)
    given = _prompts(**_masks(TEXT, TEXT), **_size(8 * (CLIP[0] - 1) + 1, pixels=32))
    return Tiny(pipe, given, CLIP)


def flux() -> Tiny:
    model = made(
        diffusers.FluxTransformer2DModel, patch_size=1, in_channels=16, num_layers=1,
        num_single_layers=1, joint_attention_dim=WIDTH, pooled_projection_dim=32,
        axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    scales = {"vae_scale_factor": 8}
    pipe = _piped(diffusers.FluxPipeline, model, flow(), scales, **SECOND_ENCODER)
    given = _prompts(**_pooled(), **PICTURE_SIZE)
    return Tiny(pipe, given, PICTURE, (TEXT, 0), guidance="true_cfg_scale")


def sd3() -> Tiny:
    """3.5 normalizes queries and keys, and attends twice in the first block."""
    model = made(
        diffusers.SD3Transformer2DModel, sample_size=PICTURE[1] * 2, patch_size=2, in_channels=4,
        num_layers=2, joint_attention_dim=WIDTH, caption_projection_dim=128,
        pooled_projection_dim=32, out_channels=4, pos_embed_max_size=32, qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )  # fmt: skip
    encoders = SECOND_ENCODER | {"tokenizer_3": None, "text_encoder_3": None}
    scales = {"vae_scale_factor": 8}
    pipe = _piped(diffusers.StableDiffusion3Pipeline, model, flow(), scales, **encoders)
    return Tiny(pipe, _prompts(**_pooled(), **PICTURE_SIZE), PICTURE, (0, TEXT))


def allegro() -> Tiny:
    model = made(
        diffusers.AllegroTransformer3DModel, attention_head_dim=96, in_channels=4, out_channels=4,
        num_layers=2, cross_attention_dim=192, sample_width=CLIP[2] * 2,
        sample_height=CLIP[1] * 2, sample_frames=CLIP[0], caption_channels=WIDTH,
    )  # fmt: skip
    scheduler = diffusers.EulerAncestralDiscreteScheduler()
    pipe = _piped(diffusers.AllegroPipeline, model, scheduler, VIDEO_SCALES)
    return Tiny(pipe, _prompts(**_masks(19, 7), **_size(17), negative_prompt=None), CLIP)


ALL: dict[str, Callable[[], Tiny]] = {
    "CogVideoX": cogvideox,
    "CogVideoX 1.5": lambda: cogvideox(2),
    "Mochi": mochi,
    "Wan 2.1": wan,
    "Wan 2.2": lambda: wan(second=True),
    "HunyuanVideo": hunyuan,
    "LTX": ltx,
    "Flux": flux,
    "SD3.5": sd3,
    "Allegro": allegro,
}

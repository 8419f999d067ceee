# SPDX-License-Identifier: Apache-2.0
"""Tiny random-weight models of the families, built by ComfyUI's own classes. ComfyUI's process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import comfy.model_patcher
import comfy.nested_tensor
import comfy.supported_models
import torch

TEXT_DIM = 64


@dataclass(frozen=True)
class Tiny:
    """Facts that it takes to build and sample a tiny model.

    Attributes:
        config: the model's own.
        latent: (channels, [frames,] height, width).
        text: text tokens.
        valid: how many of them the positive and the negative prompt really have (Mochi drops the
            rest, LTXV masks them).
        pooled: width of the pooled text embedding, 0 where a model takes none.
        sound: (channels, tokens, bins) of what is sampled beside the video, () where nothing is.
        extra: further entries of the conditioning.
        buffers: values of buffers that a checkpoint has.
    """

    model_class: str
    config: dict[str, Any]
    latent: tuple[int, ...]
    text: int = 24
    valid: tuple[int, int] | None = None
    pooled: int = 0
    sound: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


_COG = {
    "image_model": "cogvideox", "num_attention_heads": 2, "attention_head_dim": 64,
    "time_embed_dim": 64, "text_embed_dim": TEXT_DIM, "num_layers": 2, "in_channels": 16,
    "patch_size": 2, "use_rotary_positional_embeddings": True,
    "use_learned_positional_embeddings": False,
}  # fmt: skip

FAMILIES: dict[str, Tiny] = {
    "mochi": Tiny(
        "GenmoMochi",
        {
            "image_model": "mochi_preview", "depth": 2, "patch_size": 2, "num_heads": 2,
            "hidden_size_x": 256, "hidden_size_y": 64,
            "mlp_ratio_x": 48.0,  # the block asserts 12288 = hidden_size_x * mlp_ratio_x
            "mlp_ratio_y": 4.0, "learn_sigma": False, "in_channels": 12, "qk_norm": True,
            "qkv_bias": False, "out_bias": True, "attn_drop": 0.0, "patch_embed_bias": True,
            "posenc_preserve_area": True, "timestep_mlp_bias": True, "attend_to_padding": False,
            "timestep_scale": 1000.0, "use_t5": True, "t5_feat_dim": TEXT_DIM,
            "t5_token_length": 256, "rope_theta": 10000.0,
        },
        latent=(12, 4, 16, 20),
        text=32,
        valid=(20, 7),
    ),
    "cogvideox": Tiny("CogVideoX_T2V", _COG, latent=(16, 4, 16, 20)),
    "cogvideox15": Tiny(
        "CogVideoX_T2V",
        _COG | {"patch_size_t": 2, "sample_height": 96, "sample_width": 170, "sample_frames": 81},
        latent=(16, 5, 16, 20),
    ),
    "wan": Tiny(
        "WAN21_T2V",
        {
            "image_model": "wan2.1", "model_type": "t2v", "dim": 256, "out_dim": 16,
            "num_heads": 2, "ffn_dim": 128, "num_layers": 2, "patch_size": (1, 2, 2),
            "freq_dim": 256, "window_size": (-1, -1), "qk_norm": True, "cross_attn_norm": True,
            "eps": 1e-6, "in_dim": 16, "text_dim": TEXT_DIM,
        },
        latent=(16, 4, 16, 20),
    ),
    "hunyuan": Tiny(
        "HunyuanVideo",
        {
            "image_model": "hunyuan_video", "in_channels": 16, "patch_size": [1, 2, 2],
            "out_channels": 16, "vec_in_dim": 768, "axes_dim": [16, 56, 56], "meanflow": False,
            "context_in_dim": TEXT_DIM, "hidden_size": 256, "mlp_ratio": 4.0, "num_heads": 2,
            "depth": 1, "depth_single_blocks": 2, "theta": 256, "qkv_bias": True, "byt5": False,
            "guidance_embed": True, "use_cond_type_embedding": False, "vision_in_dim": None,
            "meanflow_sum": False,
        },
        latent=(16, 4, 16, 20),
        pooled=768,
    ),
    "ltxv": Tiny(
        "LTXV",
        {
            "image_model": "ltxv", "num_attention_heads": 2, "attention_head_dim": 64,
            "cross_attention_dim": 128, "caption_channels": TEXT_DIM, "num_layers": 2,
        },
        latent=(128, 4, 8, 10),
        valid=(20, 20),
        extra={"frame_rate": 25.0},
    ),
    "ltxav": Tiny(
        "LTXAV",
        {
            "image_model": "ltxav", "num_attention_heads": 2, "attention_head_dim": 64,
            "cross_attention_dim": 128, "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 64, "audio_cross_attention_dim": 128,
            "caption_channels": TEXT_DIM // 2,  # text for video and for sound, side by side
            "num_layers": 2, "connector_attention_head_dim": 32,
            "connector_num_attention_heads": 2, "connector_num_layers": 1,
        },
        latent=(128, 4, 8, 10),
        sound=(8, 30, 16),
        extra={"frame_rate": 25.0},
    ),
    "kandinsky": Tiny(
        "Kandinsky5",
        {
            "image_model": "kandinsky5", "in_text_dim": TEXT_DIM, "in_text_dim2": 48,
            "time_dim": 64, "model_dim": 128, "ff_dim": 256,
            "visual_embed_dim": 4 * (16 + 16 + 1),  # a patch of latent, image and mask
            "num_text_blocks": 1, "num_visual_blocks": 2,
        },
        latent=(16, 4, 16, 20),
        pooled=48,
    ),
    "flux": Tiny(
        "Flux",
        {
            "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 64,
            "context_in_dim": TEXT_DIM, "hidden_size": 256, "mlp_ratio": 4.0, "num_heads": 2,
            "depth": 1, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 10000,
            "patch_size": 2, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
        },
        latent=(16, 36, 40),
        pooled=64,
    ),
}  # fmt: skip


_WAN, _CLIP = FAMILIES["wan"], (4, 16, 20)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(sum(shape)))


def _wan(model_class: str, extra: dict[str, Any], **config: Any) -> Tiny:
    return replace(_WAN, model_class=model_class, config=_WAN.config | config, extra=extra)


_S2V = {
    "model_type": "s2v", "audio_dim": 64, "num_audio_token": 4, "enable_adain": False,
    "cond_dim": 0, "audio_inject_layers": [0],
}  # fmt: skip
_UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 64,
    "num_res_blocks": [1, 1], "channel_mult": [1, 2], "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1,
    "num_head_channels": 64, "use_spatial_transformer": True, "use_linear_in_transformer": True,
    "context_dim": TEXT_DIM, "adm_in_channels": None, "use_temporal_attention": False,
    "legacy": False,
}  # fmt: skip
_REFERENCE = {"reference_latents": [noise(16, 1, 16, 20)]}
_SMALL_REFERENCE = {"reference_latents": [noise(16, 1, 8, 12)]}

#: Models without a row in the pack; those whose frames stand beside their clip or attend on their
#: own; other prompts.
FAMILIES |= {
    "unet": Tiny("SD15", _UNET, latent=(4, 24, 28)),
    "square unet": Tiny("SD15", _UNET | {"transformer_depth_middle": 2}, latent=(4, 32, 32)),
    "vace": _wan(
        "WAN21_Vace",
        {
            "vace_frames": [noise(32, *_CLIP), noise(32, *_CLIP)],
            "vace_mask": [torch.ones(1, 64, *_CLIP)] * 2,
            "vace_strength": [1.0, 0.5],
        },
        model_type="vace",
        vace_layers=2,
        vace_in_dim=96,
    ),
    "s2v": _wan("WAN22_S2V", _REFERENCE | {"reference_motion": noise(16, 19, 16, 20)}, **_S2V),
    "s2v, a smaller reference": _wan("WAN22_S2V", _SMALL_REFERENCE, **_S2V),
    "scail": _wan(
        "WAN21_SCAIL",
        _REFERENCE | {"pose_video_latent": noise(16, 4, 8, 10)},
        model_type="scail",
        in_dim=20,
    ),
    "humo": _wan("WAN21_HuMo", _REFERENCE, model_type="humo"),
    "bernini": _wan("WAN21_T2V", {"context_latents": [noise(16, 2, 16, 20), noise(16, 1, 8, 12)]}),
    "animate2": _wan(
        "WAN_Animate2",
        {"pose_video_latent": noise(16, 3, 16, 20)},
        model_type="animate2",
        in_dim=36,
    ),
    "ltxav, no sound": replace(FAMILIES["ltxav"], sound=()),
    "hunyuan, padded": replace(FAMILIES["hunyuan"], valid=(15, 9)),
}


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A ModelPatcher on the CPU; weights of a dtype that cannot be computed in are cast on use."""
    cpu = torch.device("cpu")
    config = getattr(comfy.supported_models, FAMILIES[family].model_class)(
        dict(FAMILIES[family].config)
    )
    computable = dtype in (torch.float32, torch.bfloat16)
    config.set_inference_dtype(dtype, None if computable else torch.float32)
    model = config.get_model({}, "", device=cpu)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.diffusion_model.named_parameters():
            scales = name.endswith("norm.weight") or (
                parameter.ndim == 1 and name.endswith(("weight", "scale"))
            )
            spread = 0.02 if parameter.ndim <= 1 else max(1, parameter[0].numel()) ** -0.5
            values = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(torch.ones_like(values) if scales else values)
        for name, buffer in FAMILIES[family].buffers.items():
            model.diffusion_model.get_buffer(name).copy_(buffer)
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def conditioning(family: str, negative: bool = False) -> list[Any]:
    tiny = FAMILIES[family]
    generator = torch.Generator().manual_seed(2 if negative else 1)
    extra: dict[str, Any] = dict(tiny.extra)
    if tiny.pooled:
        extra["pooled_output"] = torch.randn(1, tiny.pooled, generator=generator)
    if tiny.valid:
        extra["attention_mask"] = (torch.arange(tiny.text) < tiny.valid[negative]).long()[None]
    return [[torch.randn(1, tiny.text, TEXT_DIM, generator=generator), extra]]


def empty_latent(family: str, **overrides: int) -> Any:
    shape = list(FAMILIES[family].latent)
    if "frames" in overrides:
        shape[1] = overrides["frames"]
    video, sound = torch.zeros(1, *shape), FAMILIES[family].sound
    return comfy.nested_tensor.NestedTensor((video, torch.zeros(1, *sound))) if sound else video

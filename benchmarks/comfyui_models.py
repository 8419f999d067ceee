# SPDX-License-Identifier: Apache-2.0
"""Models of ComfyUI at full size with random weights: time does not depend on the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

# ComfyUI's modules are not dependencies of the development environment.
# pyright: reportMissingImports=false
import torch


@dataclass(frozen=True)
class VideoModel:
    """Facts that it takes to build a model and to sample one clip with it.

    Attributes:
        shape: of the clip, width x height x frames, and the model's size.
        comfyui_class: name in ``comfy.supported_models``.
        config: of the diffusion model.
        depth: the entry of config that counts transformer blocks.
        latent: (channels, [frames,] height, width).
        text: (tokens, channels) of the prompt.
        wants_text_mask: the model reads the number of text tokens from an attention mask.
        pooled: width of the pooled text embedding, 0 where the model takes none.
        may_stay_dense: its calls are so short that sparse attention need not be the faster.
    """

    name: str
    shape: str
    comfyui_class: str
    config: dict[str, Any]
    depth: str
    latent: tuple[int, ...]
    text: tuple[int, int]
    wants_text_mask: bool = False
    pooled: int = 0
    may_stay_dense: bool = False

    def changed(self, shape: str, **config: Any) -> VideoModel:
        return replace(self, shape=shape, config=self.config | config)


_MOCHI = VideoModel(
    name="mochi",
    shape="848x480x163, 48 blocks",
    comfyui_class="GenmoMochi",
    config={
        "image_model": "mochi_preview",
        "depth": 48,
        "num_heads": 24,
        "hidden_size_x": 3072,
        "hidden_size_y": 1536,
        "mlp_ratio_x": 4.0,
        "in_channels": 12,
        "learn_sigma": False,
        "qk_norm": True,
        "qkv_bias": False,
        "out_bias": True,
        "posenc_preserve_area": True,
        "timestep_scale": 1000.0,
        "use_t5": True,
        "t5_feat_dim": 4096,
    },
    depth="depth",
    latent=(12, 28, 60, 106),
    text=(256, 4096),
    wants_text_mask=True,
)
_COGVIDEOX = VideoModel(
    name="cogvideox",
    shape="720x480x49, 5B",
    comfyui_class="CogVideoX_T2V",
    config={
        "image_model": "cogvideox",
        "num_attention_heads": 48,
        "num_layers": 42,
        "text_embed_dim": 4096,
        "use_rotary_positional_embeddings": True,
    },
    depth="num_layers",
    latent=(16, 13, 60, 90),
    text=(226, 4096),
)
_WAN = VideoModel(
    name="wan",
    shape="832x480x81, 14B",
    comfyui_class="WAN21_T2V",
    config={
        "image_model": "wan2.1",
        "model_type": "t2v",
        "dim": 5120,
        "ffn_dim": 13824,
        "num_heads": 40,
        "num_layers": 40,
        "text_dim": 4096,
    },
    depth="num_layers",
    latent=(16, 21, 60, 104),
    text=(512, 4096),
)

_FLUX = VideoModel(
    name="flux",
    shape="1024x1024, dev",
    comfyui_class="Flux",
    config={
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "vec_in_dim": 768,
        "context_in_dim": 4096,
        "hidden_size": 3072,
        "mlp_ratio": 4.0,
        "num_heads": 24,
        "depth": 19,
        "depth_single_blocks": 38,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "qkv_bias": True,
        "guidance_embed": True,
        "txt_ids_dims": [],
    },
    depth="depth",
    latent=(16, 128, 128),
    text=(512, 4096),
    pooled=768,
    may_stay_dense=True,
)

MODELS = {model.name: model for model in (_MOCHI, _COGVIDEOX, _WAN, _FLUX)}

#: Sizes that take seconds on a CPU, to try the benchmark itself. ComfyUI's Mochi asserts an MLP
#: 12288 wide.
_TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "mochi": {
        "depth": 2,
        "num_heads": 2,
        "hidden_size_x": 256,
        "hidden_size_y": 64,
        "mlp_ratio_x": 48.0,
        "t5_feat_dim": 64,
    },
    "cogvideox": {"num_attention_heads": 2, "num_layers": 2, "text_embed_dim": 64},
    "wan": {"dim": 256, "ffn_dim": 128, "num_heads": 2, "num_layers": 2, "text_dim": 64},
    "flux": {
        "hidden_size": 256,
        "num_heads": 2,
        "depth": 1,
        "depth_single_blocks": 2,
        "context_in_dim": 64,
    },
}


def tiny(model: VideoModel) -> VideoModel:
    small = model.changed("tiny", **_TINY_CONFIGS[model.name])
    size = (4, 16, 20) if len(model.latent) == 4 else (32, 40)
    return replace(small, latent=(model.latent[0], *size), text=(24, 64))


def with_depth(model: VideoModel, blocks: int) -> VideoModel:
    """Same clip through fewer blocks: as much memory for activations, less for weights."""
    clip = model.shape.split(",")[0]
    return model.changed(f"{clip}, {blocks} blocks", **{model.depth: blocks})


def build(model: VideoModel, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """Builds a ComfyUI ModelPatcher that lives on ``device``; weights keep activations near unit
    size."""
    import comfy.model_patcher
    import comfy.supported_models

    config = getattr(comfy.supported_models, model.comfyui_class)(dict(model.config))
    config.set_inference_dtype(dtype, None)
    base = config.get_model({}, "", device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in base.diffusion_model.named_parameters():
            if parameter.ndim > 1:
                fan_in = parameter[0].numel()
                parameter.normal_(0.0, fan_in**-0.5, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    return comfy.model_patcher.ModelPatcher(base, load_device=device, offload_device=device)


def conditioning(model: VideoModel, seed: int) -> list[Any]:
    tokens, channels = model.text
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(1, tokens, channels, generator=generator)
    extra = {}
    if model.wants_text_mask:
        extra["attention_mask"] = torch.ones(1, tokens, dtype=torch.long)
    if model.pooled:
        extra["pooled_output"] = torch.randn(1, model.pooled, generator=generator)
    return [[text, extra]]

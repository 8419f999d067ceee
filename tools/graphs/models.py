# SPDX-License-Identifier: Apache-2.0
"""The files that graphs load, and the nodes that load them."""

from __future__ import annotations

from collections.abc import Sequence

from .layout import Model, Node

HUB = "https://huggingface.co"


def _files(repository: str, *paths: str, under: str = "split_files/") -> tuple[Model, ...]:
    """Files of a repository whose folder in models/ is the last folder of their path."""
    root = f"{HUB}/{repository}/resolve/main/{under}"
    return tuple(Model(f"{root}{path}.safetensors", path.split("/")[0]) for path in paths)


MOCHI = _files(
    "Comfy-Org/mochi_preview_repackaged",
    "diffusion_models/mochi_preview_bf16",
    "text_encoders/t5xxl_fp16",
    "vae/mochi_vae",
)
MOCHI_FP8 = _files(
    "Comfy-Org/mochi_preview_repackaged", "diffusion_models/mochi_preview_fp8_scaled"
)[0]

_UMT5 = _files("Comfy-Org/Wan_2.1_ComfyUI_repackaged", "text_encoders/umt5_xxl_fp8_e4m3fn_scaled")[
    0
]
WAN_21_SMALL = (
    *_files("Comfy-Org/Wan_2.1_ComfyUI_repackaged", "diffusion_models/wan2.1_t2v_1.3B_fp16"),
    _UMT5,
    *_files("Comfy-Org/Wan_2.1_ComfyUI_repackaged", "vae/wan_2.1_vae"),
)


def wan_22(task: str) -> tuple[Model, ...]:
    """Files of the two 14B models for task "t2v" or "i2v": high noise, low noise, text, VAE."""
    high, low, vae = _files(
        "Comfy-Org/Wan_2.2_ComfyUI_Repackaged",
        f"diffusion_models/wan2.2_{task}_high_noise_14B_fp8_scaled",
        f"diffusion_models/wan2.2_{task}_low_noise_14B_fp8_scaled",
        "vae/wan_2.1_vae",
    )
    return high, low, _UMT5, vae


HUNYUAN_15 = _files(
    "Comfy-Org/HunyuanVideo_1.5_repackaged",
    "diffusion_models/hunyuanvideo1.5_720p_t2v_fp16",
    "text_encoders/qwen_2.5_vl_7b_fp8_scaled",
    "text_encoders/byt5_small_glyphxl_fp16",
    "vae/hunyuanvideo15_vae_fp16",
)

T5 = Model(
    f"{HUB}/comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp16.safetensors", "text_encoders"
)
FLUX = (
    Model(f"{HUB}/Comfy-Org/flux1-dev/resolve/main/flux1-dev.safetensors", "diffusion_models"),
    Model(
        f"{HUB}/comfyanonymous/flux_text_encoders/resolve/main/clip_l.safetensors", "text_encoders"
    ),
    T5,
    *_files("Comfy-Org/Lumina_Image_2.0_Repackaged", "vae/ae"),
)


LTX_2 = (
    Model(f"{HUB}/Lightricks/LTX-2/resolve/main/ltx-2-19b-distilled.safetensors", "checkpoints"),
    *_files("Comfy-Org/ltx-2", "text_encoders/gemma_3_12B_it_fp4_mixed"),
)
LTX_2_UPSCALER = Model(
    f"{HUB}/Lightricks/LTX-2/resolve/main/ltx-2-spatial-upscaler-x2-1.0.safetensors",
    "latent_upscale_models",
)

MINIMAX_H3 = _files(
    "Comfy-Org/MiniMax-H3",
    "diffusion_models/minimax_h3_fl2va_pruned_int8_convrot",
    "text_encoders/qwen3vl_32b_minimax_h3_nvfp4_awq",
    "vae/minimax_h3_video_vae_fp16",
    "vae/minimax_h3_audio_vae_fp32",
    under="",
)


def cog_vae(repository: str, name: str) -> Model:
    url = f"{HUB}/THUDM/{repository}/resolve/main/vae/diffusion_pytorch_model.safetensors"
    return Model(url, "vae", name)


def cog_shards(repository: str, count: int) -> list[Model]:
    """Files of the published transformer."""
    root = f"{HUB}/THUDM/{repository}/resolve/main/transformer/diffusion_pytorch_model"
    urls = [f"{root}-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    return [Model(url, "diffusion_models") for url in urls]


def cogvideox(shards: Sequence[Model]) -> Node:
    first = shards[0]  # the loader finds the others
    return Node("model", "SpargeCogVideoXLoad", (first.file, "default"), models=(first,))


def diffusion(model: Model, name: str = "model", title: str = "") -> Node:
    return Node(name, "UNETLoader", (model.file, "default"), title=title, models=(model,))


def text_encoder(kind: str, *models: Model) -> Node:
    """kind: what ComfyUI calls the way in which the model uses them."""
    files = [model.file for model in models]
    loader = "CLIPLoader" if len(models) == 1 else "DualCLIPLoader"
    return Node("clip", loader, (*files, kind, "default"), models=models)


def vae(model: Model, name: str = "vae", title: str = "") -> Node:
    return Node(name, "VAELoader", (model.file,), title=title, models=(model,))

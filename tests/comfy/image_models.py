# SPDX-License-Identifier: Apache-2.0
"""Tiny models as in models.py, of families that make images and of MiniMax H3."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import comfy.ldm.anima.model
import models
import torch
from models import TEXT_DIM, Tiny, noise

_IMAGE = (16, 36, 40)
_ONE_FRAME = (16, 1, 36, 40)

_QWEN = Tiny(
    "QwenImage",
    {
        "image_model": "qwen_image", "in_channels": 64, "num_layers": 2, "num_attention_heads": 2,
        "joint_attention_dim": TEXT_DIM,
    },
    latent=_ONE_FRAME,
)  # fmt: skip

_LUMINA = Tiny(
    "Lumina2",
    {
        "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 256, "n_heads": 2,
        "n_kv_heads": 1, "n_layers": 2, "n_refiner_layers": 1, "cap_feat_dim": TEXT_DIM,
        "qk_norm": True, "axes_dims": [32, 48, 48], "axes_lens": [300, 512, 512],
    },
    latent=_IMAGE,
)  # fmt: skip
_Z_IMAGE = replace(
    _LUMINA,
    model_class="ZImage",
    config=_LUMINA.config | {
        "n_kv_heads": 2, "z_image_modulation": True, "pad_tokens_multiple": 32,
        "time_scale": 1000.0, "rope_theta": 256.0,
    },
)  # fmt: skip
_OMNI = replace(_Z_IMAGE, config=_Z_IMAGE.config | {"siglip_feat_dim": 48}, latent=(16, 32, 40))

_SD3 = {
    "in_channels": 16, "pos_embed_scaling_factor": None, "depth": 2,  # times 64 channels
    "num_blocks": 3, "adm_in_channels": 64, "pos_embed_max_size": 32, "qk_norm": "rms",
    "context_embedder_config": {
        "target": "torch.nn.Linear", "params": {"in_features": TEXT_DIM, "out_features": 128},
    },
}  # fmt: skip
_COSMOS = {
    "image_model": "cosmos_predict2", "max_img_h": 240, "max_img_w": 240, "max_frames": 128,
    "in_channels": 16, "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1,
    "concat_padding_mask": True, "model_channels": 256, "num_blocks": 2, "num_heads": 2,
    "crossattn_emb_channels": TEXT_DIM, "pos_emb_cls": "rope3d", "pos_emb_learnable": True,
    "use_adaln_lora": True, "adaln_lora_dim": 32, "rope_enable_fps_modulation": False,
}  # fmt: skip
_COSMOS_1 = {
    **{name: value for name, value in _COSMOS.items() if name != "rope_enable_fps_modulation"},
    "image_model": "cosmos", "block_config": "FA-CA-MLP", "block_x_format": "THWBD",
    "affline_emb_norm": True, "pos_emb_learnable": False, "extra_per_block_abs_pos_emb": True,
    "extra_per_block_abs_pos_emb_type": "learnable",
}  # fmt: skip
_KREA = Tiny(
    "Krea2",
    {
        "image_model": "krea2", "features": 256, "tdim": 64, "heads": 2, "kvheads": 1, "layers": 2,
        "txtlayers": 2, "txtdim": TEXT_DIM // 2, "txtheads": 1, "txtkvheads": 1,
    },
    latent=_ONE_FRAME,
)  # fmt: skip
_HIDREAM = Tiny(
    "HiDream",
    {
        "image_model": "hidream", "patch_size": 2, "in_channels": 16, "out_channels": 16,
        "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 128,
        "num_attention_heads": 2, "caption_channels": [TEXT_DIM, TEXT_DIM], "text_emb_dim": 64,
        "axes_dims_rope": [64, 32, 32], "llama_layers": [0, 1],
    },
    latent=_IMAGE,
    pooled=64,
    extra={"conditioning_llama3": noise(2, 20, TEXT_DIM)},
)  # fmt: skip
_MINIMAX = Tiny(
    "MiniMaxH3",
    {
        "image_model": "minimax_h3", "hidden_size": 256, "num_layers": 2,
        "token_refiner_num_layers": 1, "num_attention_heads": 2, "ffn_hidden_size": 256,
        "text_dim": TEXT_DIM, "timestep_input_dim": 64, "time_embed_hidden_size": 64,
        "time_embed_dim": 64,
    },
    latent=(24, 4, 16, 20),
    sound=(32, 2, 10),
    buffers={"rope.inv_freq": 10000.0 ** -torch.linspace(0, 1, 16)},
)  # fmt: skip

_HUNYUAN = models.FAMILIES["hunyuan"]
_HUNYUAN_15 = Tiny(
    "HunyuanVideo15",
    _HUNYUAN.config | {
        "in_channels": 32 + 32 + 1, "out_channels": 32, "patch_size": [1, 1, 1], "byt5": True,
        "vec_in_dim": None, "guidance_embed": False, "use_cond_type_embedding": True,
        "vision_in_dim": 48, "meanflow_sum": True,
    },
    latent=(32, 4, 8, 10),
    extra={
        "pooled_output": None,
        "conditioning_byt5small": noise(7, 1472),
        "clip_vision_output": SimpleNamespace(last_hidden_state=noise(5, 48)),
    },
)  # fmt: skip
_FLUX_2 = Tiny(
    "Flux2",
    models.FAMILIES["flux"].config | {
        "image_model": "flux2", "in_channels": 128, "out_channels": 128, "patch_size": 1,
        "vec_in_dim": None, "axes_dim": [32, 32, 32, 32], "mlp_ratio": 3.0, "theta": 2000,
        "global_modulation": True, "mlp_silu_act": True, "qkv_bias": False, "ops_bias": False,
        "default_ref_method": "index", "ref_index_scale": 10.0, "txt_ids_dims": [3],
    },
    latent=(128, 18, 20),
)  # fmt: skip

_OMNIGEN = Tiny(
    "Omnigen2",
    {
        "image_model": "omnigen2", "axes_dim_rope": [32, 16, 16], "axes_lens": [300, 512, 512],
        "hidden_size": 128, "num_attention_heads": 2, "num_kv_heads": 1, "num_layers": 2,
        "num_refiner_layers": 1, "text_feat_dim": TEXT_DIM,
    },
    latent=_IMAGE,
    valid=(24, 24),
    extra={"reference_latents": [noise(16, 36, 40)]},
)  # fmt: skip
_BOOGU = replace(
    _OMNIGEN,
    model_class="Boogu",
    config={
        **{name: value for name, value in _OMNIGEN.config.items() if name != "text_feat_dim"},
        "image_model": "boogu", "num_layers": 1, "num_double_stream_layers": 1,
        "instruction_feat_dim": TEXT_DIM,
    },
)  # fmt: skip
_MAGE_FLOW = Tiny(
    "MageFlow",
    {
        "image_model": "mage_flow", "num_layers": 2, "num_attention_heads": 2,
        "joint_attention_dim": TEXT_DIM,
    },
    latent=(128, 18, 20),
    extra={"reference_latents": [noise(128, 18, 20), noise(128, 10, 12)]},
)  # fmt: skip
_JOY_IMAGE = Tiny(
    "JoyImage",
    {
        "image_model": "joyimage", "hidden_size": 256, "num_attention_heads": 2, "num_layers": 2,
        "text_dim": TEXT_DIM,
    },
    latent=_ONE_FRAME,
    extra={"reference_latents": [noise(16, 1, 36, 40), noise(16, 1, 20, 24)]},
)  # fmt: skip

_LENS = Tiny(
    "Lens",
    {
        "image_model": "lens", "num_layers": 2, "num_attention_heads": 2,
        "enc_hidden_dim": TEXT_DIM // 2, "selected_layer_index": (0, 1),
    },
    latent=(128, 18, 20),
)  # fmt: skip

_PIXEL_DIT = Tiny(
    "PixelDiTT2I",
    {
        "image_model": "pixeldit_t2i", "hidden_size": 128, "num_groups": 2,
        "pixel_attn_hidden_size": 256, "pixel_num_groups": 4, "patch_depth": 2, "pixel_depth": 2,
        "txt_embed_dim": TEXT_DIM,
    },
    latent=(3, 16 * 18, 16 * 20),
)  # fmt: skip


class _NoAdapter(torch.nn.Module):
    """Stands for Anima's adapter of prompts, which has 130 million weights."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


comfy.ldm.anima.model.LLMAdapter = _NoAdapter

FAMILIES: dict[str, Tiny] = {
    "qwen image": _QWEN,
    "qwen image, padded": replace(_QWEN, valid=(15, 9)),
    "qwen image edit": replace(
        _QWEN,
        config=_QWEN.config | {"default_ref_method": "index_timestep_zero"},
        extra={"reference_latents": [noise(16, 1, 36, 40), noise(16, 1, 20, 23)]},
    ),
    "lumina": _LUMINA,
    "z-image": _Z_IMAGE,
    "z-image edit": replace(
        _OMNI,
        extra={
            "reference_latents": [noise(16, 32, 40)],
            "reference_latents_text_embeds": [noise(40, TEXT_DIM)],
        },
    ),
    "sd35 large": Tiny("SD3", _SD3, latent=_IMAGE, pooled=64),
    "sd35 medium": Tiny(
        "SD3", _SD3 | {"x_block_self_attn_layers": [0, 1]}, latent=_IMAGE, pooled=64
    ),
    "cosmos": Tiny("CosmosT2V", _COSMOS_1, latent=(16, 4, 16, 20)),
    "cosmos predict2": Tiny("CosmosT2IPredict2", _COSMOS, latent=(16, 4, 16, 20)),
    "anima": Tiny("Anima", _COSMOS | {"image_model": "anima"}, latent=_ONE_FRAME),
    "krea 2": _KREA,
    "hidream": _HIDREAM,
    "hidream edit": replace(
        _HIDREAM, extra=_HIDREAM.extra | {"concat_latent_image": noise(16, 36, 40)}
    ),
    "minimax h3": _MINIMAX,
    "hunyuan 1.5": _HUNYUAN_15,
    "flux 2": _FLUX_2,
    "omnigen 2": _OMNIGEN,
    "boogu": _BOOGU,
    "mage flow": _MAGE_FLOW,
    "joy image": _JOY_IMAGE,
    "lens": _LENS,
    "lens, padded": replace(_LENS, valid=(15, 9)),
    "pixel dit": _PIXEL_DIT,
}

# SPDX-License-Identifier: Apache-2.0
"""Tiny random-weight models without a row in the pack, added to models.FAMILIES."""

from __future__ import annotations

from models import FAMILIES, TEXT_DIM, Tiny

_SD3 = {
    "in_channels": 16,
    "pos_embed_scaling_factor": None,
    "depth": 2,  # times 64 channels
    "num_blocks": 3,
    "adm_in_channels": 64,
    "pos_embed_max_size": 32,
    "qk_norm": "rms",
    "context_embedder_config": {
        "target": "torch.nn.Linear",
        "params": {"in_features": TEXT_DIM, "out_features": 128},
    },
}
_UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 64,
    "num_res_blocks": [1, 1], "channel_mult": [1, 2], "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1,
    "num_head_channels": 64, "use_spatial_transformer": True, "use_linear_in_transformer": True,
    "context_dim": TEXT_DIM, "adm_in_channels": None, "use_temporal_attention": False,
    "legacy": False,
}  # fmt: skip
_COSMOS = {
    "image_model": "cosmos_predict2", "max_img_h": 240, "max_img_w": 240, "max_frames": 128,
    "in_channels": 16, "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1,
    "concat_padding_mask": True, "model_channels": 256, "num_blocks": 2, "num_heads": 2,
    "crossattn_emb_channels": TEXT_DIM, "pos_emb_cls": "rope3d", "pos_emb_learnable": True,
    "use_adaln_lora": True, "adaln_lora_dim": 32, "rope_enable_fps_modulation": False,
}  # fmt: skip

OTHERS = {
    "sd35_large": Tiny("SD3", _SD3, latent=(16, 36, 40), pooled=64),
    "sd35_medium": Tiny(
        "SD3", _SD3 | {"x_block_self_attn_layers": [0, 1]}, latent=(16, 36, 40), pooled=64
    ),
    "unet": Tiny("SD15", _UNET, latent=(4, 24, 28)),
    "cosmos_predict2": Tiny("CosmosT2IPredict2", _COSMOS, latent=(16, 4, 16, 20)),
}
FAMILIES.update(OTHERS)

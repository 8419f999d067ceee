# SPDX-License-Identifier: Apache-2.0
"""Tiny models as in models.py, of families that make images and of MiniMax H3."""

from __future__ import annotations

from dataclasses import replace

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

FAMILIES: dict[str, Tiny] = {
    "qwen image": _QWEN,
    "qwen image, padded": replace(_QWEN, valid=(15, 9)),
    "qwen image edit": replace(
        _QWEN,
        config=_QWEN.config | {"default_ref_method": "index_timestep_zero"},
        extra={"reference_latents": [noise(16, 1, 36, 40), noise(16, 1, 20, 23)]},
    ),
    "qwen image layered": replace(_QWEN, latent=(16, 3, 36, 40)),
    "lumina": _LUMINA,
    "z-image": _Z_IMAGE,
    "z-image edit": replace(
        _OMNI,
        extra={
            "reference_latents": [noise(16, 32, 40)],
            "reference_latents_text_embeds": [noise(40, TEXT_DIM)],
        },
    ),
    "z-image edit of another size": replace(
        _OMNI, extra={"reference_latents": [noise(16, 20, 24)]}
    ),
}

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

FAMILIES: dict[str, Tiny] = {
    "qwen image": _QWEN,
    "qwen image, padded": replace(_QWEN, valid=(15, 9)),
    "qwen image edit": replace(
        _QWEN,
        config=_QWEN.config | {"default_ref_method": "index_timestep_zero"},
        extra={"reference_latents": [noise(16, 1, 36, 40), noise(16, 1, 20, 23)]},
    ),
    "qwen image layered": replace(_QWEN, latent=(16, 3, 36, 40)),
}

# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose frames stand beside their clip or attend on their own, and a U-Net."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import models
import torch
from other_models import OTHERS

_WAN = models.FAMILIES["wan"]
_CLIP = _WAN.latent[1:]


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(sum(shape)))


def _wan(model_class: str, extra: dict[str, Any], **config: Any) -> models.Tiny:
    return replace(
        _WAN, model_class=model_class, config=_WAN.config | config, extra=_WAN.extra | extra
    )


_S2V = {
    "model_type": "s2v",
    "audio_dim": 64,
    "num_audio_token": 4,
    "enable_adain": False,
    "cond_dim": 0,
    "audio_inject_layers": [0],
}

models.FAMILIES |= {
    "vace": _wan(
        "WAN21_Vace",
        {
            "vace_frames": [_noise(32, *_CLIP), _noise(32, *_CLIP)],
            "vace_mask": [torch.ones(1, 64, *_CLIP)] * 2,
            "vace_strength": [1.0, 0.5],
        },
        model_type="vace",
        vace_layers=2,
        vace_in_dim=96,
    ),
    "s2v": _wan(
        "WAN22_S2V",
        {"reference_latents": [_noise(16, 1, 16, 20)], "reference_motion": _noise(16, 19, 16, 20)},
        **_S2V,
    ),
    "s2v, a smaller reference": _wan(
        "WAN22_S2V", {"reference_latents": [_noise(16, 1, 8, 12)]}, **_S2V
    ),
    "scail": _wan(
        "WAN21_SCAIL",
        {"reference_latents": [_noise(16, 1, 16, 20)], "pose_video_latent": _noise(16, 4, 8, 10)},
        model_type="scail",
        in_dim=20,
    ),
    "humo": _wan("WAN21_HuMo", {"reference_latents": [_noise(16, 1, 16, 20)]}, model_type="humo"),
    "bernini": _wan(
        "WAN21_T2V", {"context_latents": [_noise(16, 2, 16, 20), _noise(16, 1, 8, 12)]}
    ),
    "animate2": _wan(
        "WAN_Animate2",
        {"pose_video_latent": _noise(16, 3, 16, 20)},
        model_type="animate2",
        in_dim=36,
    ),
    "hunyuan, padded": replace(models.FAMILIES["hunyuan"], valid=(15, 9)),
    "square unet": replace(
        OTHERS["unet"],
        config=OTHERS["unet"].config | {"transformer_depth_middle": 2},
        latent=(4, 32, 32),
    ),
}

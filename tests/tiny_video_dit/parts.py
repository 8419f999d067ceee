# SPDX-License-Identifier: Apache-2.0
"""A small video DiT in which no part is idle."""

from __future__ import annotations

import torch

from benchmarks.tiny_video_dit.model import Config, VideoDiT

TOY = Config(width=128, blocks=2, hidden=128)


def busy_model(random: torch.Generator, peak: float = 1.0) -> VideoDiT:
    """Model of random weights. peak: mean weight of the norms of queries and keys; above 1 heads
    do not look everywhere."""
    model = VideoDiT(TOY).requires_grad_(False)
    for name, parameter in model.named_parameters():
        spread = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
        mean = peak if "self_attn.norm" in name else float("norm" in name)
        parameter.normal_(mean, spread, generator=random)
    return model

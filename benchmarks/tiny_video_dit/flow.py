# SPDX-License-Identifier: Apache-2.0
"""Rectified flow (Liu et al. 2023) as ComfyUI samples Wan: at noise level sigma the latent is
sigma x noise + (1 - sigma) x clip, the model's answer is noise - clip, its timestep 1000 x sigma.
"""

from __future__ import annotations

import torch
from torch import Tensor

TIMESTEPS = 1000
SAMPLING_SHIFT = 8.0  # ComfyUI's default for Wan 2.1; spends most steps where little is decided yet
#: Below the sampler's, because pictures sharpen in the middle (docs/experiments.md, Noise levels of
#: training).
TRAINING_SHIFT = 5.0


def shifted(even: Tensor, shift: float) -> Tensor:
    """Noise levels for evenly spread ones (Esser et al. 2024, section 5.3.2)."""
    return shift * even / (1 + (shift - 1) * even)


def training_sigmas(count: int, generator: torch.Generator) -> Tensor:
    """(count,): one in each equal part of the range, so that few clips still cover all levels."""
    device = generator.device
    offsets = torch.rand(count, generator=generator, device=device)
    even = (torch.arange(count, device=device) + offsets) / count
    return shifted(even, TRAINING_SHIFT)


def sampling_sigmas(steps: int, shift: float = SAMPLING_SHIFT) -> Tensor:
    """(steps + 1,) from 1 down to 0: ComfyUI's "simple" schedule."""
    indices = [TIMESTEPS - int(i * (TIMESTEPS / steps)) for i in range(steps)]
    even = torch.tensor([*indices, 0], dtype=torch.float32) / TIMESTEPS
    return shifted(even, shift)


def noisy(latent: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
    """latent and noise (B, ...) mixed, sigmas (B,)."""
    return torch.lerp(latent, noise, sigmas.view(-1, *[1] * (latent.ndim - 1)))

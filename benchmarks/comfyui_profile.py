# SPDX-License-Identifier: Apache-2.0
"""Profiles whose heads have pooled keys by decree: random weights say nothing about who would."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sparge.tune import Alternating, HeadChoices, Profile


def profile_with_residual(profile: Profile, share: float, *, every_step: bool) -> Profile:
    """Profile with pooled keys in this share of its measured heads, and in no others.

    every_step: also in each second step, out of which the node leaves them.
    """

    def asked(found: Alternating) -> Alternating:
        pooling = with_residual(found.pooling, share)
        dropping = with_residual(found.dropping, share) if every_step else found.dropping
        return type(found).of(pooling, dropping)  # ComfyUI loads the pack under a name of its own

    choices = {table: asked(found) for table, found in profile.choices.items()}
    return dataclasses.replace(profile, choices=choices)


def with_residual(choices: HeadChoices, share: float) -> HeadChoices:
    """Choices with pool weight 1 in this share of the measured heads, evenly spread over layers and
    heads, and 0 in the others.

    Heads whose pool weight changes lose their output scale. Densities, routers and token orders are
    as they were.
    """
    heads = int(choices.measured.sum()) * choices.heads
    # Just above: the product of a share like 0.3 may lie below the whole number that is meant.
    places = (torch.arange(heads + 1, dtype=torch.float64) * share + 1e-9).floor()
    gain = torch.zeros_like(choices.gain)
    gain[choices.measured] = places.diff().to(gain.dtype).view(-1, choices.heads)
    contrast = choices.contrast.masked_fill(gain != choices.gain, 1)
    return dataclasses.replace(choices, gain=gain, contrast=contrast)

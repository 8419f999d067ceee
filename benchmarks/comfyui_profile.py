# SPDX-License-Identifier: Apache-2.0
"""Profiles whose heads have pooled keys by decree: random weights say nothing about who would."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sparge.tune import HeadChoices, Profile


def profile_with_residual(profile: Profile, share: float) -> Profile:
    """Profile with pooled keys in this share of its measured heads, and in no others."""
    choices = {table: with_residual(found, share) for table, found in profile.choices.items()}
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

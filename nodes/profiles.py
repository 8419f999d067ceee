# SPDX-License-Identifier: Apache-2.0
"""Profiles of measured heads: found by name, fitted to a model, made of a run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..sparge.calibrate import (
    Aim,
    Fingerprint,
    Fit,
    HeadChoices,
    Profile,
    ProfileError,
    profile_path,
)
from .head_table import Shape
from .measured_heads import table_of

#: Norm weights that tell a model from its finetunes, spread over its depth.
NORMS = 8


@dataclass(frozen=True, eq=False)
class NamedProfile:
    """What the node SpargeProfileLoad hands on: a profile, or why there is none."""

    name: str
    profile: Profile | None
    problem: str = ""

    @classmethod
    def load(cls, folder: Path, name: str) -> NamedProfile:
        try:
            return cls(name, Profile.load(profile_path(folder, name)))
        except ProfileError as error:
            return cls(name, None, str(error))

    def usable_for(self, model: Fingerprint | None, aim: Aim | None) -> tuple[Profile | None, str]:
        """The profile if it may be used, and what the user has to know, if anything."""
        if aim is None or model is None:
            return None, f"the profile {self.name} has no effect in manual mode"
        if self.profile is None:
            return None, f"{self.problem} This run measures"
        verdict = self.profile.fits(model)
        if not verdict.usable:
            return None, verdict.sentence
        measured_for = Aim(self.profile.mode, self.profile.asked)
        if measured_for != aim:
            return None, (
                f"The profile {self.name} is for {measured_for} and this node asks for {aim}, so "
                "it is not used and this run measures"
            )
        return self.profile, "" if verdict.fit is Fit.FITS else verdict.sentence


def fingerprint_of(model_patcher: Any) -> Fingerprint:
    """Of the model as loaded, and of what is patched onto its weights (LoRA). Waits for the GPU."""
    network = model_patcher.model.diffusion_model
    network = getattr(network, "_orig_mod", network)  # torch.compile's wrapper
    norms = {
        name: weight.as_subclass(torch.Tensor)  # GGUF loaders have a class of their own
        for name, weight in network.named_parameters()
        if "norm" in name and weight.ndim == 1 and weight.is_floating_point() and not weight.is_meta
    }
    names = sorted(norms)[:: max(1, len(norms) // NORMS)][:NORMS]
    patches = [patch for found in model_patcher.patches.values() for patch in found]
    strengths = sum(float(patch[0]) for patch in patches)
    return Fingerprint.of(
        type(network).__name__,
        {name: norms[name] for name in names}
        | {"patches": torch.tensor([float(len(patches)), strengths])},
    )


def profile_of(
    model: Fingerprint, aim: Aim, choices: dict[Shape, HeadChoices], notes: dict[str, str]
) -> Profile | None:
    """What a run measured; None when it measured nothing."""
    if not choices:
        return None
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    tables = {table_of(shape): found for shape, found in choices.items()}
    return Profile(model, tables, aim.kind, aim.value, created, notes)

# SPDX-License-Identifier: Apache-2.0
"""Profiles of measured heads: found by name, fitted to a model, made of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..sparge.tune import Aim, Fingerprint, Fit, Profile, ProfileError
from ..sparge.tune.fingerprint import VALUES
from ..sparge.tune.profile_path import SUFFIX

#: Number of patched weights that tell LoRAs apart.
PATCHED = 8


@dataclass(frozen=True, eq=False)
class NamedProfile:
    """Output of the node SpargeProfileLoad: a profile, or why there is none."""

    name: str
    profile: Profile | None
    problem: str = ""

    @classmethod
    def load(cls, name: str, file: Path | None) -> NamedProfile:
        """Loads a profile. file: where it is; None where there is none of that name."""
        shown = name.removesuffix(SUFFIX)
        if not shown.strip():
            return cls(shown, None, "Load Sparge Profile has no name")
        if file is None:
            return cls(shown, None, f"There is no profile {shown}")
        try:
            return cls(shown, Profile.load(file))
        except ProfileError as error:
            return cls(shown, None, str(error).rstrip("."))

    def __str__(self) -> str:
        """Contents of the profile, or the reason why there are none."""
        if self.profile is None:
            return self.problem
        aim = Aim(self.profile.mode, self.profile.asked)
        return f"{self.profile.fingerprint.architecture}, for {aim}"

    def usable_for(self, model: Fingerprint | None, aim: Aim | None) -> tuple[Profile | None, str]:
        """Returns the profile if it may be used, and what the user has to know, if anything."""
        if aim is None or model is None:
            return None, f"manual mode does not use the profile {self.name}"
        if self.profile is None:
            return None, f"{self.problem}, so this run measures"
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
    """Fingerprint of the model as loaded, and of what is patched onto its weights (LoRA). Waits for
    the GPU."""
    patches = _mark_of(model_patcher.patches)
    return Fingerprint.of_network(model_patcher.model.diffusion_model, patches=patches)


def _mark_of(patches: Mapping[Any, Sequence[Any]]) -> torch.Tensor:
    """(2,): 0 without patches, else a place between -1 and 1 on either axis that other keys,
    strengths or values hardly share. Two LoRAs of one model often differ in values alone."""
    if not any(patches.values()):
        return torch.zeros(2)
    digest = hashlib.sha256()
    keys = sorted(patches, key=str)
    sampled = set(keys[:: max(1, len(keys) // PATCHED)][:PATCHED])
    for key in keys:
        digest.update(str(key).encode())
        for strength, value, *_ in patches[key]:
            digest.update(f"{float(strength):g}".encode())
            for tensor in _tensors_in(value) if key in sampled else ():
                digest.update(tensor.detach().flatten()[:VALUES].cpu().float().numpy().tobytes())
    places = [int.from_bytes(digest.digest()[at : at + 3], "big") for at in (0, 3)]
    return torch.tensor(places) / (1 << 23) - 1


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a patch, whose values ComfyUI nests in tuples and in adapters'
    `weights`."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors_in(part)
    elif hasattr(value, "weights"):
        yield from _tensors_in(value.weights)

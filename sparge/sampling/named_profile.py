# SPDX-License-Identifier: Apache-2.0
"""Profile of measured heads as a user hands it to a run and saves it after one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..checks.argument import shown
from ..tune import Aim, Fingerprint, Fit, Profile, ProfileError
from ..tune.profile_path import SUFFIX
from .result import RunResult
from .verdict import first_reason

#: Name of a profile that no file has.
GIVEN = "given"


@dataclass(frozen=True, eq=False)
class NamedProfile:
    """A profile, or why there is none."""

    name: str
    profile: Profile | None
    problem: str = ""

    @classmethod
    def load(cls, name: str, file: Path | None) -> NamedProfile:
        """Loads a profile. file: where it is; None where there is none of that name."""
        if file is None:
            return cls(name, None, f"There is no profile {name}")
        try:
            return cls(name, Profile.load(file))
        except ProfileError as error:
            return cls(name, None, str(error).rstrip("."))

    @classmethod
    def of(cls, given: object) -> NamedProfile:
        """Profile from what a caller gave: itself, or the path of its file.

        Raises:
            ValueError: it is neither.
        """
        if isinstance(given, Profile):
            return cls(GIVEN, given)
        path = _file_of(given)
        return cls.load(path.stem, path)

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
                f"The profile {self.name} is for {measured_for} and this run asks for {aim}, so "
                "it is not used and this run measures"
            )
        return self.profile, "" if verdict.fit is Fit.FITS else verdict.sentence


def _file_of(given: object) -> Path:
    """File of a profile whose path is given with or without its suffix. Raises ValueError for what
    is no path."""
    if not isinstance(given, (str, os.PathLike)) or not Path(given).name:
        raise ValueError(f'profile is {shown(given)}; give the path of a file, say "wan{SUFFIX}".')
    path = Path(given).absolute()
    return path if path.name.lower().endswith(SUFFIX) else path.with_name(path.name + SUFFIX)


def save_profile(result: RunResult, given: object) -> str:
    """Saves what a run measured, over a file that is there, and says so.

    given: path of the file, with or without its suffix.

    Raises:
        ValueError: it is no path.
        ProfileError: the run measured nothing, or the file cannot be written; the message ends a
            sentence that begins with "No profile was saved: ".
    """
    if result.profile is None:
        raise ProfileError(f"{_why_none(result)}.")
    path = _file_of(given)
    replaces = path.exists()
    result.profile.save(path)
    return f"Saved the profile {path.name}{' over the one of that name' if replaces else ''}."


def _why_none(result: RunResult) -> str:
    """Why a run has no profile to save."""
    if result.from_profile:
        return "this run used one instead of measuring"
    if result.report.aim is None:
        return "no head was measured, which takes an auto mode"
    if not result.tally.sparse and (reason := first_reason(result)):
        return f"nothing was sparse ({reason.rstrip('.')})"
    return "no head was measured"

# SPDX-License-Identifier: Apache-2.0
"""Each head measured in the dense steps, then sparse as far as the asked quality allows."""

from .calibration import Calibration
from .candidates import CandidateSet
from .choices import HeadChoices
from .fingerprint import Fingerprint, Fit, Verdict
from .measure import Measure, Measured, Sample, measure_for, reference_measure
from .profile import Profile
from .profile_error import ProfileError
from .profile_header import Table
from .profile_path import profile_path
from .workload import Workload

__all__ = [
    "Calibration",
    "CandidateSet",
    "Fingerprint",
    "Fit",
    "HeadChoices",
    "Measure",
    "Measured",
    "Profile",
    "ProfileError",
    "Sample",
    "Table",
    "Verdict",
    "Workload",
    "measure_for",
    "profile_path",
    "reference_measure",
]

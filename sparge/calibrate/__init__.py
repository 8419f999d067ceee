# SPDX-License-Identifier: Apache-2.0
"""Measures each head in exact calls, then chooses how sparse it may be for the asked quality."""

from .aim import Aim
from .alternating import Alternating
from .calibration import BLOCKS_A_CALL, Calibration
from .candidates import CandidateSet
from .choices import HeadChoices
from .fingerprint import Fingerprint, Fit, Verdict
from .kernel_measure import kernel_measure, measure_for
from .layer_budgets import LayerBudgets
from .loudness import mean_error
from .measure import Measure, Measured, Sample, reference_measure
from .probe import Probe
from .profile import Profile
from .profile_error import ProfileError
from .profile_header import Table
from .profile_path import profile_path
from .step_choices import StepChoices, later_choices
from .workload import Workload

__all__ = [
    "BLOCKS_A_CALL",
    "Aim",
    "Alternating",
    "Calibration",
    "CandidateSet",
    "Fingerprint",
    "Fit",
    "HeadChoices",
    "LayerBudgets",
    "Measure",
    "Measured",
    "Probe",
    "Profile",
    "ProfileError",
    "Sample",
    "StepChoices",
    "Table",
    "Verdict",
    "Workload",
    "kernel_measure",
    "later_choices",
    "mean_error",
    "measure_for",
    "profile_path",
    "reference_measure",
]

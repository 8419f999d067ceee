# SPDX-License-Identifier: Apache-2.0
"""Sparse attention that tunes itself while a diffusion model samples: `Session`."""

from .aim import Aim
from .call import Call, DenseOnce
from .candidates import CandidateSet
from .facts import Conditioning, Layout, PassFacts, Place
from .head_measuring import FAILED
from .head_table import HeadTable
from .head_weights import mean_error
from .kernel_measure import kernel_measure, measure_for
from .layer_spans import LayerSpans
from .measure import Measure, Measured, MeasuredCall, reference_measure
from .measured_shape import MeasuredShape
from .measurement import BLOCKS_A_CALL, Measurement
from .model import Model
from .progress import Progress
from .real_tokens import MASK, ReadMasks, RealTokens
from .records import Densities, PassRecord, RunTime, Way
from .report import Report
from .sequences import Sequences, TextPosition
from .session import Session
from .session_pass import MEASURING, Plan, SessionPass
from .settings_table import SettingsTable
from .shape import Shape
from .step_settings import StepSettings
from .tally import Tally
from .ways import Ways, fitted
from .window import SigmaWindow
from .workload import Workload

__all__ = [
    "BLOCKS_A_CALL",
    "FAILED",
    "MASK",
    "MEASURING",
    "Aim",
    "Call",
    "CandidateSet",
    "Conditioning",
    "DenseOnce",
    "Densities",
    "HeadTable",
    "LayerSpans",
    "Layout",
    "Measure",
    "Measured",
    "MeasuredCall",
    "MeasuredShape",
    "Measurement",
    "Model",
    "PassFacts",
    "PassRecord",
    "Place",
    "Plan",
    "Progress",
    "ReadMasks",
    "RealTokens",
    "Report",
    "RunTime",
    "Sequences",
    "Session",
    "SessionPass",
    "SettingsTable",
    "Shape",
    "SigmaWindow",
    "StepSettings",
    "Tally",
    "TextPosition",
    "Way",
    "Ways",
    "Workload",
    "fitted",
    "kernel_measure",
    "mean_error",
    "measure_for",
    "reference_measure",
]

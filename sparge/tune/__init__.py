# SPDX-License-Identifier: Apache-2.0
"""Sparse attention that tunes itself while a diffusion model samples: `Session`."""

from ..calibrate import Aim
from .call import Call, Exact, ExactOnce, TensorCall
from .facts import Conditioning, Layout, PassFacts, Place
from .head_table import FAILED, HeadTable
from .measured_shape import MeasuredShape
from .model import Model
from .records import Densities, PassRecord
from .report import Report
from .session import Session
from .session_pass import MEASURING, Plan, SessionPass
from .shape import Shape

__all__ = [
    "FAILED",
    "MEASURING",
    "Aim",
    "Call",
    "Conditioning",
    "Densities",
    "Exact",
    "ExactOnce",
    "HeadTable",
    "Layout",
    "MeasuredShape",
    "Model",
    "PassFacts",
    "PassRecord",
    "Place",
    "Plan",
    "Report",
    "Session",
    "SessionPass",
    "Shape",
    "TensorCall",
]

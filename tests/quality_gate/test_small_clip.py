# SPDX-License-Identifier: Apache-2.0
"""The quality gate on any machine: a small clip of the shipped model, its calls in float32."""

from __future__ import annotations

import pytest
import torch

from .gate import SMALL, behind_drop, below_floors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_full_clips guards GPUs")


@torch.no_grad()
def test_auto_keeps_its_quality(one_thread: None) -> None:
    clips = SMALL.clips()
    found = SMALL.found(clips)
    assert [*below_floors(found, SMALL.floors()), *behind_drop(SMALL, found, clips)] == []

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, one_thread: None) -> str:
    """Device that a test runs on: the reference on the CPU, kernels on a GPU."""
    return request.param

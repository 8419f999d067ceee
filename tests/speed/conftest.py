# SPDX-License-Identifier: Apache-2.0
"""Fixture of the self-test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparge.speed import self_test


@pytest.fixture
def untested() -> Iterator[None]:
    """No device was tested yet, nor is one known after the test."""
    self_test._wrong.cache_clear()
    yield
    self_test._wrong.cache_clear()

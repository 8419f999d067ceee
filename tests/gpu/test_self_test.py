# SPDX-License-Identifier: Apache-2.0
"""The self-test of kernels: it passes here, with all 8-bit kernels that this GPU can run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sparge.kernels.spec import HEAD_DIMS
from sparge.session.timing import MOST, largest_error
from tests.gpu.conftest import KERNELS, Kernels

pytestmark = pytest.mark.gpu
EIGHT_BIT = [kernels for kernels in KERNELS if kernels.element.quantized]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_own_kernels_pass(head_dim: int, poison: None) -> None:
    assert largest_error(head_dim, torch.device("cuda", 0)) <= MOST


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kernels", EIGHT_BIT, ids=lambda kernels: kernels.id)
def test_every_8bit_kernel_passes(
    kernels: Kernels, head_dim: int, force: Callable[[Kernels], None], poison: None
) -> None:
    force(kernels)
    assert largest_error(head_dim, torch.device("cuda", 0)) <= MOST

# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests share."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch

from sparge.kernels import Element, capabilities

POISON_BYTES = 1 << 28


@pytest.fixture
def poison() -> None:
    """Memory that torch hands out next holds NaN: an element nobody wrote shows itself."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        block = torch.full((POISON_BYTES // 4,), float("nan"), device="cuda")
        del block


@pytest.fixture
def force_element(monkeypatch: pytest.MonkeyPatch) -> Callable[[Element], None]:
    """Runs the kernels of one element, also where it is not this GPU's own (emulated E4M3)."""

    def force(element: Element) -> None:
        module = importlib.import_module("sparge.call")
        monkeypatch.setattr(module, "native_element", lambda *_: element)

    return force


def int8_elements() -> list[Element]:
    """The INT8 elements that this GPU's target can build."""
    if not torch.cuda.is_available():
        return [Element.INT8_FP16]
    has_e4m3 = capabilities("cuda").arch not in ("sm_80", "sm_86", "sm_100a", "sm_103a")
    return [Element.INT8_FP16, *([Element.INT8_E4M3] if has_e4m3 else [])]

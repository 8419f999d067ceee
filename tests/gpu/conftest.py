# SPDX-License-Identifier: Apache-2.0
"""Fixtures that the GPU tests share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sparge.kernels import Element, KernelSpec, capabilities
from sparge.kernels.params import HOPPER_ATTEND, HOPPER_ATTEND_16
from sparge.kernels.spec import HOPPER_ENTRIES, AttendPath
from sparge.reference.arithmetic import (
    HOPPER_SOFTMAX,
    HOPPER_SOFTMAX_16,
    PORTABLE_SOFTMAX,
    OnlineSoftmax,
)

POISON_BYTES = 1 << 28


@pytest.fixture
def poison() -> None:
    """Memory that torch hands out next holds NaN: an element nobody wrote shows itself."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        block = torch.full((POISON_BYTES // 4,), float("nan"), device="cuda")
        del block


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """Every kernel spec that is launched from here on."""
    module = importlib.import_module("sparge.stages.launch")
    specs: list[KernelSpec] = []
    get_kernel = module.get_kernel

    def record(spec: KernelSpec, index: int):
        specs.append(spec)
        return get_kernel(spec, index)

    monkeypatch.setattr(module, "get_kernel", record)
    return specs


@dataclass(frozen=True)
class Kernels:
    """Kernels that a test runs: operand types, attend entry and its softmax."""

    element: Element
    entry: str = "attend"
    softmax: OnlineSoftmax = PORTABLE_SOFTMAX

    @property
    def id(self) -> str:
        return f"{self.entry}-{self.element.name}"


HOPPER_8BIT = Kernels(Element.INT8_E4M3, HOPPER_ATTEND, HOPPER_SOFTMAX)
HOPPER = (HOPPER_8BIT, Kernels(Element.BF16, HOPPER_ATTEND_16, HOPPER_SOFTMAX_16))


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernels], None]:
    """Runs these kernels, also where they are not this GPU's own choice (emulated E4M3)."""

    def force(kernels: Kernels) -> None:
        if kernels.entry in HOPPER_ENTRIES and capabilities("cuda").arch != "sm_90a":
            pytest.skip("wgmma exists on sm_90a only")
        call = importlib.import_module("sparge.call")
        launch = importlib.import_module("sparge.stages.launch")
        monkeypatch.setattr(call, "native_element", lambda *_: kernels.element)
        path = AttendPath(kernels.entry, "forced by a test")
        monkeypatch.setattr(launch, "attend_path", lambda *_: path)

    return force


def assert_same_lse(lse: Tensor, emulated: Tensor, kernels: Kernels, tolerance: float) -> None:
    """Log-sum-exps of the same rows; both say where a row sees no key.

    Where the tensor cores sum P as it was rounded, a weight that rounds the other way moves a row
    that it dominates: E4M3 has three bits, so by up to an eighth of the weight. An H200 reached
    0.026, and beyond 1e-3 one row in two hundred. They add with 13 bits, which lost 1e-3 at most.
    """
    seen = emulated.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    off = lse[seen] - emulated[seen]
    if not kernels.softmax.sums_rounded:
        torch.testing.assert_close(lse[seen], emulated[seen], rtol=1e-4, atol=tolerance)
    elif off.numel():
        assert off.abs().max() <= 1 / 16
        assert (off.abs() > 4 * tolerance).sum() <= 1 + off.numel() // 100
        assert off.mean().abs() <= 2 * tolerance


def int8_elements() -> list[Element]:
    """The INT8 elements that this GPU's target can build."""
    if not torch.cuda.is_available():
        return [Element.INT8_FP16]
    has_e4m3 = capabilities("cuda").arch not in ("sm_80", "sm_86", "sm_100a", "sm_103a")
    return [Element.INT8_FP16, *([Element.INT8_E4M3] if has_e4m3 else [])]

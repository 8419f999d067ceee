# SPDX-License-Identifier: Apache-2.0
"""Fixtures, kernels and measures that the GPU tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.metrics import rel_l2
from sparge import SparsePolicy, TokenOrder, attention, reference
from sparge.kernels import Element, Kernel, KernelSpec, capabilities, loader
from sparge.kernels.params import HOPPER_ATTEND, HOPPER_ATTEND_16
from sparge.kernels.spec import HOPPER_ENTRIES, all_specs
from sparge.policy import Precision
from sparge.stages import launches, prepared
from sparge.stages.prepared import PreparedCall
from sparge.stages.workspace import WorkspaceLayout
from tests.oracle import HOPPER_SOFTMAX, HOPPER_SOFTMAX_16, PORTABLE_SOFTMAX, OnlineSoftmax

POISON_BYTES = 1 << 28
HALF = SparsePolicy(topk=0.5, pvthreshd=15.0)
ELEMENTS = [Element.INT8_FP16, Element.INT8_E4M3, Element.INT8_INT8, Element.BF16]
every_element = pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)


@pytest.fixture(autouse=True)
def element_is_built(request: pytest.FixtureRequest) -> None:
    """Skips the elements that this GPU has no kernels of."""
    element = getattr(request.node, "callspec", None) and request.node.callspec.params.get(
        "element"
    )
    if isinstance(element, Element) and torch.cuda.is_available():
        arch = capabilities("cuda").arch
        if element not in {spec.element for spec in all_specs(arch) if spec.reads_element}:
            pytest.skip(f"{arch} has no kernels of {element.name}")


#: Kernel against emulation, float32 output, relative L2. Two effects: exp2 differs in its last bits
#: and a few probabilities round the other way (to 11, 4 or 8 bits); the offset of INT8 scores
#: shifts the logits of a block by up to half a level, 1e-3 in the steepest case here.
#: An H200 reached 1.3e-5, steep 1.0e-4 (FP16 P) and 1.3e-4, steep 8.8e-4 (E4M3 P). Integer P has
#: the bound of E4M3: its levels lie 1/255 of the block's largest apart.
TIGHT = {
    Element.INT8_FP16: 2e-4,
    Element.INT8_E4M3: 2e-3,
    Element.INT8_INT8: 2e-3,
    Element.BF16: 1e-3,
    Element.FP16: 1e-4,
}


@dataclass(frozen=True)
class Kernels:
    """Kernels that a test runs: operand types, attend entry and its softmax."""

    element: Element
    entry: str = "attend"
    softmax: OnlineSoftmax = PORTABLE_SOFTMAX

    @property
    def sums_rounded(self) -> bool:
        """Whether row sums are of P as it was rounded."""
        return self.softmax.sums_rounded or self.element is Element.INT8_INT8

    @property
    def id(self) -> str:
        return f"{self.entry}-{self.element.name}"

    def of_dtype(self, dtype: torch.dtype) -> Kernels:
        """Kernels that run on inputs of that type: fp16 takes FP16 products in 16 bits."""
        fp16 = dtype == torch.float16 and self.element is Element.BF16
        return replace(self, element=Element.FP16) if fp16 else self


HOPPER_8BIT = Kernels(Element.INT8_E4M3, HOPPER_ATTEND, HOPPER_SOFTMAX)
HOPPER = (HOPPER_8BIT, Kernels(Element.BF16, HOPPER_ATTEND_16, HOPPER_SOFTMAX_16))
KERNELS = [*map(Kernels, ELEMENTS), *HOPPER]
every_kernel = pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.id)


def with_element(policy: SparsePolicy, element: Element) -> SparsePolicy:
    return replace(policy, precision=Precision.INT8 if element.quantized else Precision.SIXTEEN_BIT)


@pytest.fixture
def poison() -> None:
    """Memory that torch hands out next holds NaN: an element nobody wrote shows itself."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        block = torch.full((POISON_BYTES // 4,), float("nan"), device="cuda")
        del block


def spec_of(kernel: Kernel) -> KernelSpec:
    """Spec of a kernel that was loaded."""
    return next(spec for (spec, _), known in loader._kernels.items() if known is kernel)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """Every kernel spec that is launched from here on."""
    specs: list[KernelSpec] = []
    launch = Kernel.launch

    def record(kernel: Kernel, *given: Any) -> None:
        specs.append(spec_of(kernel))
        launch(kernel, *given)

    monkeypatch.setattr(Kernel, "launch", record)
    return specs


@pytest.fixture(autouse=True)
def nothing_prepared() -> Iterator[None]:
    """Calls are prepared anew for each test, which may patch what prepares them."""
    prepared._kept.clear()
    yield
    prepared._kept.clear()


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernels], None]:
    """Runs these kernels, also where they are not this GPU's own choice (emulated E4M3)."""

    def force(kernels: Kernels) -> None:
        arch = capabilities("cuda").arch
        if kernels.entry in HOPPER_ENTRIES and arch != "sm_90a":
            pytest.skip("wgmma exists on sm_90a only")
        if kernels.element not in {spec.element for spec in all_specs(arch)}:
            pytest.skip(f"{arch} has no kernels of {kernels.element.name}")
        prepared._kept.clear()
        monkeypatch.setattr(launches, "native_element", lambda *_: kernels.element)
        monkeypatch.setattr(launches, "attend_entry", lambda *_: kernels.entry)

    return force


class Workspace(NamedTuple):
    """Workspace of a call, as it leaves it."""

    memory: Tensor
    layout: WorkspaceLayout

    def fields(self) -> dict[str, Tensor]:
        return {name: self.layout.view(self.memory, name) for name in self.layout.fields}


@contextmanager
def workspaces() -> Iterator[list[Workspace]]:
    """Context that keeps the workspaces of calls, prepared anew."""
    kept: list[Workspace] = []
    queue = PreparedCall.queue

    def on_gpu(self: PreparedCall, *given: Any) -> Tensor:
        kept.append(Workspace(queue(self, *given), self.layout))
        return kept[-1].memory

    prepared._kept.clear()
    with (
        mock.patch.object(PreparedCall, "queue", on_gpu),
        mock.patch.object(prepared, "MEMORY_FLOOR", 1 << 40),  # all heads at once
    ):
        yield kept


def fields_of(
    q: Tensor, k: Tensor, v: Tensor, element: Element, policy: SparsePolicy, **options: Any
) -> dict[str, Tensor]:
    """Fields of the workspace of a call with operands of this type."""
    with workspaces() as kept, mock.patch.object(launches, "native_element", lambda *_: element):
        attention(q, k, v, with_element(policy, element), **options)
    prepared._kept.clear()
    (workspace,) = kept
    return workspace.fields()


@contextmanager
def no_waits() -> Iterator[None]:
    """Whatever waits for the GPU inside raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def in_float32(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, pooled: Tensor | None = None, *,
    order: TokenOrder | None = None, key_lengths: Tensor | None = None, vbar: Tensor | None = None,
    **rules: Any,
) -> Tensor:  # fmt: skip
    """Attention over the same blocks as the reference computes it. vbar: mean values in place of
    those of q, k and v. rules: as `reference.attend` takes them."""
    x = reference.Operands.of(q, k, v, order, key_lengths=key_lengths, vbar=vbar)
    return reference.attend(x, kept, pooled, **rules).out


def assert_emulated(
    kernels: Kernels, out: Tensor, lse: Tensor, emulated: Tensor, emulated_lse: Tensor,
    exact: Tensor, lse_tolerance: float = 1e-3,
) -> None:  # fmt: skip
    """The kernels' result is that of their arithmetic, and errs as little beside float32."""
    assert torch.isfinite(out).all()
    tight, size = TIGHT[kernels.element], emulated.norm().clamp(min=1e-3)
    assert (out - emulated).norm() / size <= tight
    assert_same_lse(lse, emulated_lse, kernels, lse_tolerance)
    assert rel_l2(out, exact) <= 1.2 * rel_l2(emulated, exact) + tight


def assert_same_lse(lse: Tensor, emulated: Tensor, kernels: Kernels, tolerance: float) -> None:
    """Log-sum-exps of the same rows; both say where a row sees no key.

    Where sums are of P as it was rounded, a weight that rounds the other way moves a row that it
    dominates: E4M3 has three bits, so by up to an eighth of the weight. An H200 reached
    0.026, and beyond 1e-3 one row in two hundred. They add with 13 bits, which lost 1e-3 at most.
    """
    seen = emulated.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    off = lse[seen] - emulated[seen]
    if not kernels.sums_rounded:
        torch.testing.assert_close(lse[seen], emulated[seen], rtol=1e-4, atol=tolerance)
    elif off.numel():
        assert off.abs().max() <= 1 / 16
        assert (off.abs() > 4 * tolerance).sum() <= 1 + off.numel() // 100
        assert off.mean().abs() <= 2 * tolerance


def assert_ties(differs: Tensor, scores: Tensor, slack: float, one_alone: bool = False) -> None:
    """Blocks that kernel and reference choose otherwise tie to rounding in their row.

    one_alone: where a mass is asked for, that of one block may lie on either side of the target.
    """
    for row in differs.any(-1).nonzero():
        tied = scores[tuple(row.tolist())][differs[tuple(row.tolist())]]
        alone = one_alone and len(tied) == 1
        assert alone or tied.max() - tied.min() <= slack * (1 + tied.abs().max()), "not a tie"

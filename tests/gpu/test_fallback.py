# SPDX-License-Identifier: Apache-2.0
"""Fallback on Hopper, where the compiler refuses what only sm_90a has: kernels of sm_90 serve a
call."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch

import sparge
from sparge import KernelBuildError, Precision, SparsePolicy, reference
from sparge.common.metrics import rel_l2
from sparge.kernels import Element, KernelSpec, capabilities, device, loader
from sparge.kernels.cubin import Cubin
from sparge.kernels.spec import HOPPER_ENTRIES
from sparge.stages import kernel_check
from tests.gpu.test_stages import TIGHT, kernel_stages, means_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def without_wgmma(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """Launches on a Hopper GPU of which nothing is known yet."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has a target of its own and a plain one")
    launched: list[KernelSpec] = []
    build: Callable[[KernelSpec], Cubin] = loader.load_cubin
    launch = importlib.import_module("sparge.stages.launch")

    def refuse(spec: KernelSpec) -> Cubin:
        if spec.entry in HOPPER_ENTRIES:
            raise KernelBuildError(f"Kernel {spec.id} does not compile.", "no wgmma today")
        return build(spec)

    def record(spec: KernelSpec, index: int):
        launched.append(spec)
        return loader.get_kernel(spec, index)

    monkeypatch.setattr(device, "_known", {})
    monkeypatch.setattr(device, "_refused", set())
    monkeypatch.setattr(device, "_in_use", set())
    monkeypatch.setattr(kernel_check, "_built", set())
    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(loader, "load_cubin", refuse)
    monkeypatch.setattr(launch, "get_kernel", record)
    return launched


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("precision", "element"),
    [(Precision.INT8, Element.INT8_FP16), (Precision.SIXTEEN_BIT, Element.BF16)],
    ids=["8-bit", "16-bit"],
)
def test_the_plain_target_serves(
    precision: Precision,
    element: Element,
    head_dim: int,
    without_wgmma: list[KernelSpec],
    make_qkv,
    poison: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    q, k, v = make_qkv(1, 4, 799, head_dim, device="cuda")
    policy = SparsePolicy(topk=0.4, precision=precision)
    assert capabilities("cuda").arch == "sm_90a"
    out, lse = sparge.attention(q, k, v, policy, output_dtype=torch.float32, return_lse=True)
    entries = ["quantize", "route", "attend"]
    if element is Element.INT8_FP16:
        entries.insert(0, "means")
    specs = [KernelSpec(entry, "sm_90", head_dim, element) for entry in entries]
    assert list(dict.fromkeys(without_wgmma)) == specs, "maybe once for each group of heads"
    (warning,) = [record for record in caplog.records if record.name == "sparge"]
    assert "no wgmma today" in warning.getMessage()
    assert "sm_90a did not compile" in capabilities("cuda").note

    plan = sparge.make_plan(q, k, policy)
    means = means_of(kernel_stages(q, k, v, element, None), element, head_dim)
    quantized = reference.quantize_qkv(q, k, v, element=element, **means)
    emulated = reference.attend(quantized, plan.kept(), scale=head_dim**-0.5)
    assert rel_l2(out, emulated.out) <= TIGHT[element]
    torch.testing.assert_close(lse, emulated.lse, rtol=1e-4, atol=1e-3)
    exact, _ = reference.exact_attention(q, k, v, plan.kept())
    assert rel_l2(out, exact) <= 1.2 * rel_l2(emulated.out, exact) + TIGHT[element]

# SPDX-License-Identifier: Apache-2.0
"""Fallback on Hopper, where the compiler refuses what only sm_90a has: kernels of sm_90 serve a
call."""

from __future__ import annotations

import pytest
import torch

import sparge
from benchmarks.kept import kept_blocks
from sparge import KernelBuildError, Precision, SparsePolicy
from sparge.kernels import Element, KernelSpec, capabilities, loader
from sparge.kernels.cubin import Cubin
from sparge.kernels.spec import HOPPER_ENTRIES, Source
from tests.gpu.conftest import Kernels, assert_emulated, fields_of, in_float32
from tests.gpu.test_stages import means_of
from tests.oracle import attend, quantize_qkv

pytestmark = pytest.mark.gpu


@pytest.fixture
def without_wgmma(monkeypatch, fresh_targets, launched) -> list[KernelSpec]:
    """Launches on a Hopper GPU of which nothing is known yet."""
    if capabilities("cuda").arch != "sm_90a":
        pytest.skip("only Hopper has a target of its own and a plain one")
    build = loader.load_cubin

    def refuse(spec: KernelSpec) -> Cubin:
        if spec.entry in HOPPER_ENTRIES:
            raise KernelBuildError(f"Kernel {spec.id} does not compile.", "no wgmma today")
        return build(spec)

    fresh_targets()
    monkeypatch.setattr(loader, "_kernels", {})
    monkeypatch.setattr(loader, "load_cubin", refuse)
    return launched


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("element", [Element.INT8_FP16, Element.BF16], ids=["8-bit", "16-bit"])
def test_the_plain_target_serves(
    element: Element, head_dim: int, without_wgmma, make_qkv, poison, caplog
) -> None:
    q, k, v = make_qkv(1, 4, 799, head_dim, device="cuda")
    precision = Precision.INT8 if element.quantized else Precision.SIXTEEN_BIT
    policy = SparsePolicy(topk=0.4, precision=precision)
    assert capabilities("cuda").arch == "sm_90a"
    out, lse = sparge.attention(q, k, v, policy, output_dtype=torch.float32, return_lse=True)
    entries = ["quantize", "route", "attend"]
    if element.quantized:
        entries.insert(0, "means")
    source = Source.BF16
    specs = [KernelSpec(entry, "sm_90", head_dim, element, source=source) for entry in entries]
    assert list(dict.fromkeys(without_wgmma)) == specs, "maybe once for each group of heads"
    (warning,) = [record for record in caplog.records if record.name == "sparge"]
    assert "no wgmma today" in warning.getMessage()
    assert "sm_90a did not compile" in capabilities("cuda").note

    kept = kept_blocks(q, k, policy)
    means = means_of(fields_of(q, k, v, element, policy), element, head_dim)
    quantized = quantize_qkv(q, k, v, element=element, **means)
    emulated = attend(quantized, kept, scale=head_dim**-0.5)
    exact = in_float32(q, k, v, kept, scale=head_dim**-0.5)
    assert_emulated(Kernels(element), out, lse, emulated.out, emulated.lse, exact)

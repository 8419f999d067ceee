# SPDX-License-Identifier: Apache-2.0
"""Variants of 8-bit attention on a GPU whose target has several; on Hopper with `--arch
sm_90_as_120`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import sparge
from sparge import SparsePolicy, TokenGrid, grid_order
from sparge.kernels import Element, KernelSpec, capabilities, chosen
from sparge.kernels.spec import HEAD_DIMS, variants
from sparge.speed import kept, self_test, speed_table
from sparge.speed.self_test import MOST, error_beside_emulation
from sparge.speed.variants import choose_fastest
from sparge.tune import Measurement, Workload, kernel_measure, reference_measure
from sparge.tune.measure import Measure

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
every_variant = pytest.mark.parametrize(
    "element", [Element.INT8_INT8, Element.INT8_E4M3, Element.BF16], ids=lambda e: e.name
)


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "_choices", chosen.Choices())


@pytest.fixture
def arch() -> str:
    found = capabilities(GPU).arch
    if len(variants(found)) == 1:
        pytest.skip(f"{found} has one variant: --arch sm_90_as_120 on a Hopper GPU has several")
    return found


@pytest.fixture
def choose(arch: str) -> Callable[[Element], None]:
    """choose(element): calls of both head_dims use it from now on."""

    def choose(element: Element) -> None:
        if element not in variants(arch):
            pytest.skip(f"{element.name} does not serve 8-bit calls of {arch}")
        chosen.choose(0, arch, dict.fromkeys(HEAD_DIMS, element))

    return choose


@every_head_dim
def test_each_passes_the_self_test_and_no_other_arithmetic(
    arch: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for element in variants(arch):
        assert error_beside_emulation(element, head_dim, GPU) <= MOST
    expected = self_test.expected

    def tampered(element: Element, q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        out = expected(element, q, k, v, kept)
        out[..., 40:60, 7] *= 1.5  # one channel of some rows
        return out

    monkeypatch.setattr(self_test, "expected", tampered)
    assert all(error_beside_emulation(e, head_dim, GPU) > MOST for e in variants(arch))


def test_the_fastest_is_found_and_the_same_for_the_next_process(
    arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARGE_CACHE", str(tmp_path))
    monkeypatch.setattr(kept, "_known", {})
    monkeypatch.setattr(kept, "is_disturbed", lambda table: False)  # tests share the GPU
    table = speed_table(GPU)
    assert table is not None
    assert table.chosen.elements.keys() == set(HEAD_DIMS) and table.chosen.is_among(variants(arch))
    assert not any(table.chosen.refused.values())
    monkeypatch.setattr(kept, "_known", {})
    monkeypatch.setattr(kept, "choose_fastest", None)
    assert speed_table(GPU) == table


def test_a_wrong_one_is_dropped(arch: str, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    *_, wrong = variants(arch)
    expected = self_test.expected

    def tampered(element: Element, q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        return expected(element, q, k, v, kept) * (1.1 if element is wrong else 1.0)

    monkeypatch.setattr(self_test, "expected", tampered)
    found = choose_fastest(GPU, variants(arch))
    assert found.refused == dict.fromkeys(HEAD_DIMS, (wrong,))
    assert wrong not in found.elements.values() and "computes something else" in caplog.text


@every_variant
def test_all_calls_use_what_was_chosen(element: Element, choose, launched, make_qkv) -> None:
    choose(element)
    q, k, v = make_qkv(1, 4, 799, 128, device="cuda")
    order = grid_order(TokenGrid(1, 17, 47)).on(GPU)
    found = {sparge.attention(q, k, v, SparsePolicy(topk=0.4), order=order).isfinite().all()}
    reading = {spec.element for spec in launched if spec.reads_element}
    assert all(found) and reading == {element}
    launched.clear()
    filtered = SparsePolicy(topk=0.4, pvthreshd=15.0)
    sparge.attention(q, k, v, filtered)
    own = variants(capabilities(GPU).arch)[0]
    assert KernelSpec("attend", capabilities(GPU).arch, 128, own, True) in launched


@every_variant
def test_heads_are_measured_with_it_where_it_is_quantized(
    element: Element, choose, launched, make_qkv
) -> None:
    choose(element)
    grid = TokenGrid(7, 12, 15, prefix=70)
    qkv = make_qkv(1, 4, grid.tokens, 128)

    def errors(measure: Measure, device: str) -> np.ndarray:
        measurement = Measurement.begin(
            layers=1, heads=4, workload=Workload(grid_order(grid)), measure=measure, device=device
        )
        measurement.add(0, *(x.to(device) for x in qkv))
        return measurement.fetched.errors_and_scales()[0]

    by_kernels, by_reference = errors(kernel_measure, "cuda"), errors(reference_measure, "cpu")
    measuring = element if element.quantized else Element.INT8_INT8
    assert {spec.element for spec in launched if spec.reads_element} == {measuring}
    assert (np.abs(by_kernels - by_reference) <= 0.05 * by_reference + 0.01).all()

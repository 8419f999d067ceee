# SPDX-License-Identifier: Apache-2.0
"""Instructions that a compiler makes of the main loop on consumer GPUs: a turn of it is noticed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from benchmarks.issue_model import nvdisasm
from benchmarks.issue_model.kernel import Kernel
from benchmarks.issue_model.kinds import Kind
from benchmarks.issue_model.table import table
from sparge.kernels import device
from sparge.kernels.spec import Element, KernelSpec
from sparge.speed.predicted import CLOCKS

#: The figures below are of this NVRTC, as this nvdisasm shows them.
NVRTC, NVDISASM = (13, 0), (13, 5)
SPECS = [
    KernelSpec("attend", target, head_dim, Element.INT8_INT8)
    for target in ("sm_86", "sm_89", "sm_120a")
    for head_dim in (64, 128)
]
#: By head_dim, of one warp and 64 keys. It has 32 rows at 64 and 16 at 128; products are
#: 16 x 8 x 32.
PRODUCTS, CONVERSIONS = {64: 32, 128: 32}, {64: 100, 128: 82}
FRAGMENTS, EXPONENTIALS, SHUFFLES = {64: 20, 128: 32}, {64: 68, 128: 34}, {64: 8, 128: 4}
MOST_INSTRUCTIONS = {
    ("sm_86", 64): 723,
    ("sm_89", 64): 723,
    ("sm_120a", 64): 762,
    ("sm_86", 128): 507,
    ("sm_89", 128): 507,
    ("sm_120a", 128): 544,
}
#: Copies of a tile. Its scales, which one thread copies, are counted beside them where they
#: are predicated.
COPIES = {
    ("sm_86", 64): 4,
    ("sm_89", 64): 4,
    ("sm_120a", 64): 4,
    ("sm_86", 128): 8,
    ("sm_89", 128): 8,
    ("sm_120a", 128): 10,
}
#: Of an SM, for 128 queries x 64 keys.
MOST_CLOCKS = {64: 1350, 128: 2400}


@pytest.fixture(scope="module", autouse=True)
def _same_compiler(compiler) -> None:
    try:
        found = nvdisasm.release()
    except nvdisasm.NvdisasmMissingError as error:
        pytest.skip(str(error))
    if found != NVDISASM:
        pytest.skip(f"the figures are of nvdisasm {NVDISASM}, and this is {found}")
    if (version := device.compiler().version) != NVRTC:
        pytest.skip(f"the figures are of NVRTC {NVRTC}, and this is {version}")


@pytest.fixture(scope="module")
def kernel_of(pack_cubin) -> Callable[[KernelSpec], Kernel]:
    return cache(lambda spec: Kernel(spec, pack_cubin(spec)))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_instructions_of_the_hot_loop(spec: KernelSpec, kernel_of) -> None:
    kernel, head_dim = kernel_of(spec), spec.head_dim
    counts = kernel.counts
    products = {name: n for name, n in counts.items() if "MMA" in name}
    assert products == {
        "IMMA.16832.S8.S8": PRODUCTS[head_dim],
        "IMMA.16832.U8.S8": PRODUCTS[head_dim],
    }
    # Scores to levels, in pairs; row sums; the sums of the values to float32.
    assert counts[Kind.CONVERT] == CONVERSIONS[head_dim]
    assert Kind.SLOW_CONVERT not in counts
    assert counts[Kind.MUFU] == EXPONENTIALS[head_dim]
    assert counts[Kind.SHFL] == SHUFFLES[head_dim]
    assert counts[Kind.LDSM] == FRAGMENTS[head_dim]
    assert counts[Kind.LDGSTS] == COPIES[spec.arch, head_dim]
    assert len(kernel.path) <= MOST_INSTRUCTIONS[spec.arch, head_dim]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_resources_of_the_consumer_kernels(spec: KernelSpec, kernel_of) -> None:
    kernel = kernel_of(spec)
    found = (kernel.warp_rows, kernel.warps, kernel.blocks_an_sm, kernel.stages, kernel.spills)
    assert found == ((32, 4, 3, 2, 0) if spec.head_dim == 64 else (16, 4, 3, 1, 0))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_clocks_foretold_for_consumer_gpus(head_dim: int, kernel_of) -> None:
    # sm_89 has the code of sm_86, and its GPUs the same rates of INT8.
    kernels = [kernel_of(spec) for spec in SPECS if spec.head_dim == head_dim]
    assert kernels[0].path == kernels[1].path
    for kernel in (kernels[0], kernels[2]):
        clocks = kernel.pipe_clocks
        assert max(clocks.values()) == clocks["tensor"] <= kernel.clocks <= MOST_CLOCKS[head_dim]
    for kernel in (kernels[0], kernels[2]):
        told = CLOCKS[kernel.spec.arch][head_dim]
        assert told == pytest.approx(kernel.clocks, rel=0.03), "sparge/speed/predicted.py is old"
    shown = table([kernels[0]])
    assert f"predicted{round(kernels[0].clocks):>32}" in shown and "GA102 RTX 30" in shown

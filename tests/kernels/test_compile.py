# SPDX-License-Identifier: Apache-2.0
"""The gate for the kernels this pack can run, on a machine without a GPU."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace

import pytest

from sparge.errors import KernelBuildError
from sparge.kernels.cubin import read_launch_info, read_static_shared
from sparge.kernels.params import PARAMS
from sparge.kernels.source import read_sources
from sparge.kernels.spec import (
    ARCHS,
    RELEASE_ARCHS,
    Element,
    KernelSpec,
    Source,
    all_specs,
    attend_entry,
    eight_bit_element,
)
from tests.kernels.sass import SPECS as HOT_LOOP

SPECS = [spec for arch in RELEASE_ARCHS for spec in all_specs(arch)]


#: Targets for which quantize for any type is compiled, by its element: others share its code.
OF_ANY = {
    Element.INT8_FP16: ("sm_80",),
    Element.INT8_E4M3: ("sm_90a",),
    Element.INT8_INT8: ("sm_120a",),
    Element.BF16: ("sm_80",),
}


def has_twin(spec: KernelSpec) -> bool:
    """Whether another kernel has its code, or only tests of a GPU can reach it: FP16 has that of
    BF16 but for the type, quantize for FP16 that for BF16, attend has less without the PV filter
    than with it, and sm_86 and sm_100a share the sources of sm_80 and sm_120a. Where the
    hot loop is counted of a kernel without the filter, that one stands for both."""
    if spec.arch == "sm_100a" or spec.element is Element.FP16:
        return True
    if spec.entry == "quantize":
        of_one = spec.source is Source.BF16 and spec.element is eight_bit_element(spec.arch)
        of_any = spec.source is Source.ANY and spec.arch in OF_ANY[spec.element]
        return not (of_one or (of_any and spec.head_dim == 128))
    if not spec.reads_element:
        return spec.arch in ("sm_86", "sm_89")
    if spec.arch == "sm_89" or (spec.arch, spec.head_dim) == ("sm_120a", 64):
        return spec not in HOT_LOOP
    unfiltered = replace(spec, pv_filter=True) in SPECS and not spec.pv_filter
    reached = attend_entry(spec.arch, spec.element) == spec.entry
    if spec.element is Element.INT8_FP16:
        reached = spec.arch == "sm_80"
    alike = {Element.INT8_INT8: ("sm_89", "sm_90a"), Element.BF16: ("sm_86",)}
    return unfiltered or spec.arch in alike.get(spec.element, ()) or not reached


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_kernel_compiles_and_fits(spec: KernelSpec, pack_cubin, request: pytest.FixtureRequest):
    if has_twin(spec) and not request.config.getoption("--all-kernels"):
        pytest.skip("another kernel has its code; --all-kernels compiles it too")
    cubin = pack_cubin(spec)
    info, static = read_launch_info(cubin.image), read_static_shared(cubin.image, spec.entry)
    assert info.threads % 32 == 0 and 0 < info.threads <= 1024
    # The driver keeps 1 KiB of each block's for itself, which these limits leave out already.
    assert info.shared_bytes + static <= ARCHS[spec.arch].shared_limit
    registers = re.search(r"Used (\d+) registers", cubin.log)
    assert registers and int(registers[1]) * info.threads <= 65536
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in cubin.log
    # Warnings, and the C75xx notes that say wgmma was serialised.
    assert not re.search(r"warning( #|\s*:)|Potential Performance Loss", cubin.log, re.IGNORECASE)


def test_a_kernel_that_does_not_compile_brings_the_log(compiler, csrc):
    spec = KernelSpec("route", "sm_80")
    cubin = compiler.compile(spec, read_sources("route", csrc))
    assert read_launch_info(cubin.image).shared_bytes == 4096
    assert "registers" in cubin.log
    (csrc / "common" / "twice.cuh").write_text("#error not today\n")
    with pytest.raises(KernelBuildError, match="route-sm_80-d128") as caught:
        compiler.compile(spec, read_sources("route", csrc))
    log = caught.value.log.replace('"', "")
    assert "common/twice.cuh(1): catastrophic error: #error directive: not today" in log
    assert "not today" in log


def test_each_option_reaches_the_device(compiler, csrc):
    spec = KernelSpec("attend", "sm_89", 64)
    sources = read_sources("attend", csrc)
    check = (
        "static_assert(SPARGE_ARCH == 89 && SPARGE_HEAD_DIM == 64 && SPARGE_PV_FILTER == 0);\n"
        f"static_assert(SPARGE_PARAMS_BYTES == {ctypes.sizeof(PARAMS['attend'])});\n"
        "static_assert(SPARGE_ELEMENT == 0 && __CUDA_ARCH__ == 890 && __cplusplus == 201703L);\n"
        "constexpr int plain(int x) { return x + 1; }\n"
        "__device__ int use(int x) { return plain(x); }\n"
    )
    image = compiler.compile(spec, replace(sources, text=sources.text + check)).image
    assert read_launch_info(image).threads == 96

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from sparge.kernels.cubin import LaunchInfo, read_launch_info, read_sizes, read_static_shared
from sparge.kernels.params import SIZES
from sparge.kernels.report import Report, parse_report

KERNEL = 'extern "C" __global__ void k(int* p) { *p = 1; }\n'
STRUCT = "struct LaunchInfo { unsigned threads, shared_bytes; };\n"
CONST = 'extern "C" __device__ const '
INFO = "LaunchInfo launch_info = {384, 232448u};"


@pytest.fixture(scope="module")
def build(compiler):
    def compile_text(text: str, *options: str, arch: str = "sm_90a"):
        return compiler.nvrtc.compile("k.cu", text, {}, [f"--gpu-architecture={arch}", *options])

    return compile_text


@pytest.mark.parametrize(
    ("definition", "found"),
    [
        (CONST + INFO, True),
        (f'extern "C" __constant__ {INFO}', True),
        # A neighbour of similar name and a padded section: the offset within it must be used.
        (f"{CONST}LaunchInfo launch_information = {{1, 2}};\n{CONST}{INFO}", True),
        ("", False),
        ('extern "C" __device__ LaunchInfo launch_info;', False),
    ],
)
def test_launch_info_is_read(build, definition, found):
    image = build(STRUCT + definition + "\n" + KERNEL).image
    if found:
        assert read_launch_info(image) == LaunchInfo(threads=384, shared_bytes=232448)
    else:
        with pytest.raises(ValueError, match="launch_info"):
            read_launch_info(image)
    with pytest.raises(ValueError, match="cut short"):
        read_launch_info(image[:80])


def test_sizes_and_static_shared_memory_are_read(build):
    image = build(f"{CONST}unsigned launch_sizes[3] = {{16, 8, 70000}};\n" + KERNEL).image
    found = read_sizes(image, "route")
    assert found and bytes(found) == b"".join(n.to_bytes(4, "little") for n in (16, 8, 70000))
    assert read_sizes(image, "quantize") is None
    without = build(KERNEL).image
    for entry in SIZES:
        with pytest.raises(ValueError, match="launch_sizes"):
            read_sizes(without, entry)

    tile = KERNEL.replace("*p = 1;", "__shared__ volatile float tile[256]; tile[*p] = *p;")
    for arch in ("sm_80", "sm_90a"):  # from which on cubins count what the driver keeps
        for text, shared in ((KERNEL, 0), (tile, 1024)):
            assert read_static_shared(build(text, arch=arch).image, "k") == shared


def test_the_report_of_a_kernel_that_spills(build):
    spilling = """
    extern "C" __global__ void __launch_bounds__(1024) k(float* p) {
      __shared__ float tile[256];
      float x[96];
      #pragma unroll
      for (int i = 0; i < 96; i++) x[i] = p[i * 1024 + threadIdx.x];
      tile[threadIdx.x % 256] = x[0];
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < 96; i++) p[i * 1024 + threadIdx.x] = x[95 - i] * tile[i] + x[i];
    }
    """
    assert parse_report(build(KERNEL).log) is None
    report = parse_report(build(spilling, "--ptxas-options=-v").log)
    assert report and report.stack > 0
    assert (report.registers, report.static_shared) == (64, 1024)  # what 1024 threads leave each
    assert report.spills == report.spill_stores + report.spill_loads > 0


def test_the_report_of_nvcc_and_of_older_nvrtc():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    48 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 40 registers, 520 bytes smem, 360 bytes cmem[0]
k.cu(3): warning #177-D: variable "x" was declared but never referenced
"""
    report = parse_report(log)
    assert report is not None and "177-D" in report.notes[1]
    assert report.notes[0].endswith("wgmma.mma_async instructions are serialized")
    assert report == Report(40, 520, 48, 12, 20, report.notes)
    assert Report.from_json(report.to_json()) == report

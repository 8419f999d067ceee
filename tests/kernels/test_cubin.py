# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from sparge.kernels.cubin import LaunchInfo, read_launch_info, read_sizes, read_static_shared
from sparge.kernels.params import SIZES

KERNEL = 'extern "C" __global__ void k(int* p) { *p = 1; }\n'
STRUCT = "struct LaunchInfo { unsigned threads, shared_bytes; };\n"
CONST = 'extern "C" __device__ const '
INFO = "LaunchInfo launch_info = {384, 232448u};"


@pytest.fixture(scope="module")
def build(compiler):
    def compile_text(text: str, *options: str, arch: str = "sm_90a"):
        return compiler.compile_text("k.cu", text, {}, [f"--gpu-architecture={arch}", *options])

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

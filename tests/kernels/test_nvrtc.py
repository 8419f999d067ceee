# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from sparge.errors import KernelBuildError
from sparge.kernels import loader, nvrtc
from sparge.kernels.device import arch_for
from sparge.kernels.nvrtc import Nvrtc, NvrtcError, NvrtcNotFoundError
from sparge.kernels.spec import ARCHS, KernelSpec

PROGRAM = 'extern "C" __global__ void k(int* p) { *p = VALUE; }\n'
SM_90A = "--gpu-architecture=sm_90a"


def test_compiles_to_the_same_elf_file_each_time_with_headers_from_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = nvrtc.load()
    headers = {"a/one.cuh": '#include "b/two.cuh"\n', "b/two.cuh": "#define VALUE 3\n"}
    program = '#include "a/one.cuh"\n' + PROGRAM
    image = found.compile_text("k.cu", program, headers, [SM_90A]).image
    assert image.startswith(b"\x7fELF")
    assert found.compile_text("k.cu", program, headers, [SM_90A]).image == image
    assert found.compile_text("k.cu", PROGRAM, {}, [SM_90A, "-DVALUE=8"]).image != image
    del headers["b/two.cuh"]
    with pytest.raises(NvrtcError, match=r"b/two\.cuh"):
        found.compile_text("k.cu", program, headers, [])
    with pytest.raises(NvrtcError, match="gpu-architecture"):
        found.compile_text("k.cu", PROGRAM, {}, ["--gpu-architecture=sm_1"])


@pytest.fixture
def hidden(monkeypatch):
    """No NVRTC anywhere, to a process that has not loaded one."""
    monkeypatch.setattr(nvrtc, "libraries", lambda prefer_major=None: [])
    nvrtc.load.cache_clear()
    yield
    nvrtc.load.cache_clear()


def test_without_nvrtc_each_layer_says_so(hidden, tmp_path: Path):
    wrong = tmp_path / "libnvrtc.so.13"
    wrong.write_bytes(b"not a library")
    with pytest.raises(NvrtcNotFoundError, match=r"libnvrtc\.so\.13"):
        Nvrtc(wrong)
    with pytest.raises(NvrtcNotFoundError, match="nvidia-cuda-nvrtc"):
        nvrtc.load()
    with pytest.raises(KernelBuildError, match="NVRTC was not found"):
        loader.load_cubin(KernelSpec("means", "sm_90a"))
    capability = arch_for((9, 0), "H100")
    assert not capability.usable and "NVRTC was not found" in capability.reason


def test_search_prefers_what_torch_was_built_for_and_knows_windows_names(tmp_path, monkeypatch):
    """A folder that cannot be entered, such as CUDA_HOME of another user, hides no other."""
    thirteen, twelve = tmp_path / "one" / "libnvrtc.so.13", tmp_path / "two" / "libnvrtc.so.12"
    others = [thirteen.with_name(f"libnvrtc{rest}") for rest in (".alt.so.13", "-builtins.so.13.0")]
    for path in (thirteen, twelve, *others):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    unread = closed / "lib64", closed, thirteen / "lib64", tmp_path / ("n" * 300)
    folders = [*unread, thirteen.parent, twelve.parent, tmp_path / "absent"]
    monkeypatch.setattr(nvrtc, "_folders", lambda: iter(folders))
    monkeypatch.setattr(nvrtc, "_LIBRARY", nvrtc._library_pattern("linux"))
    assert nvrtc.libraries() == nvrtc.libraries(13) == [thirteen, twelve]
    assert nvrtc.libraries(12) == [twelve, thirteen]
    pattern = nvrtc._library_pattern("win32")
    for name, major in {"nvrtc64_120_0.dll": "12", "nvrtc64_130_0.dll": "13"}.items():
        assert (found := pattern.fullmatch(name)) and found[1] == major
    for name in ("nvrtc64_120_0.alt.dll", "nvrtc-builtins64_128.dll"):
        assert pattern.fullmatch(name) is None


@pytest.mark.parametrize("library", nvrtc.libraries(), ids=lambda p: p.name)
def test_every_target_an_nvrtc_is_said_to_build(library: Path):
    """Each NVRTC of this environment, though a run uses one: the table's ``needs`` must be true."""
    one = Nvrtc(library)
    for arch in ARCHS.values():
        options = [f"--gpu-architecture={arch.target}", "-DVALUE=1"]
        if one.version >= arch.needs:
            assert arch.number in one.archs
            one.compile_text("k.cu", PROGRAM, {}, options)
        elif arch.number not in one.archs:
            with pytest.raises(NvrtcError):
                one.compile_text("k.cu", PROGRAM, {}, options)

# SPDX-License-Identifier: Apache-2.0
"""Compile kernels ahead of time: ``python -m sparge.kernels.build --arch sm_90a``.

Needs no GPU. Without ``--out`` the kernels go where the library looks for them first at run time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import nvrtc
from .compile import NvrtcCompiler
from .cubin import Cubin
from .folder import cache_folder, distrust, make_folder, why_none
from .graph import Job, ninja_program, run_ninja
from .source import find_csrc
from .spec import ARCHS, RELEASE_ARCHS, KernelSpec, all_specs, native_specs
from .store import Store


def build(job: Job, workers: int) -> dict[KernelSpec, Cubin | None]:
    """Build what is not there yet; None stands for a kernel that failed (its log was printed).

    Raises FileNotFoundError when a source file is missing, OSError when ``job.out`` cannot be
    written, or others could put code of theirs there.
    """
    make_folder(job.out)
    if why := distrust(job.out):
        raise PermissionError(f"no kernels are built there: {why}, or choose a folder of your own")
    store, sources = Store(job.out), job.sources()

    def found() -> dict[KernelSpec, Cubin | None]:
        return {spec: store.find(spec, sources[spec.entry], job.compiler) for spec in job.specs}

    if missing := tuple(spec for spec, cubin in found().items() if cubin is None):
        run_ninja(ninja_program(), replace(job, specs=missing), workers)
    return found()


def prepare(arch: str) -> dict[KernelSpec, Cubin | None]:
    """Put what a user of ``arch`` can reach into the user's cache.

    Uses every core with any NVRTC, which the threads of ``warm`` do only from 13.0 on.
    Returns and raises as ``build``; NvrtcNotFoundError without a compiler.
    """
    out = cache_folder()
    if out is None:
        raise OSError(f"{why_none()}: set SPARGE_CACHE to a folder of your own")
    job = Job(tuple(native_specs(arch)), find_csrc(), out.absolute(), _compiler(None))
    return build(job, os.cpu_count() or 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sparge.kernels.build", description=__doc__)
    parser.add_argument("--arch", action="append", choices=[*ARCHS, "all"], required=True)
    parser.add_argument("--out", type=Path, help="folder for the cubins (default: user's cache)")
    parser.add_argument("--nvrtc", type=Path, help="an NVRTC library other than torch's")
    parser.add_argument("--csrc", type=Path, help="other CUDA sources than the pack's")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args(arguments)
    out = chosen.out or cache_folder()
    if out is None:
        parser.error(f"{why_none()}: set SPARGE_CACHE to a folder of your own, or give --out")
    try:
        compiler = _compiler(chosen.nvrtc)
        job = _job(chosen.arch, out.absolute(), chosen.csrc, compiler)
        started = time.monotonic()
        built = build(job, max(1, chosen.jobs))
    except (nvrtc.NvrtcNotFoundError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    failed = sum(cubin is None for cubin in built.values())
    seconds = time.monotonic() - started
    print(f"{len(built) - failed} kernels in {out} with {compiler.label}, {seconds:.1f} s")
    if failed:
        print(f"{failed} kernels failed; the compiler's words are above", file=sys.stderr)
    return 1 if failed else 0


def _job(archs: Sequence[str], out: Path, csrc: Path | None, compiler: NvrtcCompiler) -> Job:
    names = dict.fromkeys(n for a in archs for n in (RELEASE_ARCHS if a == "all" else (a,)))
    specs = tuple(spec for name in names for spec in all_specs(name))
    return Job(specs, (csrc or find_csrc()).absolute(), out, compiler)


def _compiler(library: Path | None) -> NvrtcCompiler:
    if library is not None:
        return NvrtcCompiler(nvrtc.Nvrtc(library))
    from .device import compiler  # imports torch, to know its CUDA version

    return NvrtcCompiler(compiler())


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Compile kernels ahead of time: ``python -m sparge.kernels.build --arch sm_90a``.

Needs no GPU. The kernels go into the user's cache (``SPARGE_CACHE``), where the library looks for
them at run time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .cubin import Cubin
from .device import compiler
from .folder import cache_folder, distrust, make_folder, why_none
from .nvrtc import Nvrtc, NvrtcNotFoundError
from .source import find_csrc, read_sources
from .spec import ARCHS, RELEASE_ARCHS, KernelSpec, all_specs
from .store import Store


def build(specs: Sequence[KernelSpec], nvrtc: Nvrtc, out: Path) -> dict[KernelSpec, Cubin | None]:
    """Build what is not there yet, in as many processes as there are cores; None stands for a
    kernel that failed (its log was printed).

    Raises FileNotFoundError when a source file is missing, OSError when ``out`` cannot be written,
    or others could put code of theirs there.
    """
    make_folder(out)
    if why := distrust(out):
        raise PermissionError(f"no kernels are built there: {why}, or choose a folder of your own")
    store, csrc = Store(out), find_csrc()
    sources = {entry: read_sources(entry, csrc) for entry in {spec.entry for spec in specs}}

    def found() -> dict[KernelSpec, Cubin | None]:
        return {spec: store.find(spec, sources[spec.entry], nvrtc) for spec in specs}

    if missing := [spec for spec, cubin in found().items() if cubin is None]:
        edge = Path(__file__).with_name("edge.py")
        command = [sys.executable, str(edge), str(csrc), str(out), str(nvrtc.path)]
        _run_ninja(command, [spec.id for spec in missing])
    return found()


def _run_ninja(command: list[str], targets: list[str]) -> None:
    """Runs ``command TARGET`` for each target, side by side. What one of them says on failing is
    printed."""
    import ninja  # from its wheel, which the requirements name: what PATH offers is not asked

    program = Path(ninja.BIN_DIR, "ninja.exe" if sys.platform == "win32" else "ninja")
    windows = sys.platform == "win32"
    quoted = subprocess.list2cmdline(command) if windows else shlex.join(command)
    graph = [
        "ninja_required_version = 1.5",
        "rule cubin",
        f"  command = {quoted.replace('$', '$$')} $out",
        "  description = $out",
        *(f"build {target}: cubin" for target in targets),
    ]
    # A new folder, which only this user can enter: ninja runs what the graph says.
    with tempfile.TemporaryDirectory(prefix="sparge-") as folder:
        Path(folder, "build.ninja").write_bytes(os.fsencode("\n".join(graph) + "\n"))
        # -k 0: one broken kernel must not hide what the others say.
        workers = str(os.cpu_count() or 1)
        subprocess.run([str(program), "-C", folder, "-j", workers, "-k", "0"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sparge.kernels.build", description=__doc__)
    parser.add_argument("--arch", action="append", choices=[*ARCHS, "all"], required=True)
    chosen = parser.parse_args(arguments).arch
    archs = dict.fromkeys(n for a in chosen for n in (RELEASE_ARCHS if a == "all" else (a,)))
    out = cache_folder()
    if out is None:
        parser.error(f"{why_none()}: set SPARGE_CACHE to a folder of your own")
    started = time.monotonic()
    try:
        nvrtc = compiler()
        built = build([spec for arch in archs for spec in all_specs(arch)], nvrtc, out)
    except (NvrtcNotFoundError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    failed = sum(cubin is None for cubin in built.values())
    seconds = time.monotonic() - started
    print(f"{len(built) - failed} kernels in {out} with {nvrtc.label}, {seconds:.1f} s")
    if failed:
        print(f"{failed} kernels failed; the compiler's words are above", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

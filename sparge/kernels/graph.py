# SPDX-License-Identifier: Apache-2.0
"""Build many cubins at once: as a ninja graph, one edge each."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .compile import NvrtcCompiler
from .source import Sources, read_sources
from .spec import KernelSpec


@dataclass(frozen=True)
class Job:
    """Job of a build: what to build, from which sources, with what, into which folder."""

    specs: tuple[KernelSpec, ...]
    csrc: Path
    out: Path
    compiler: NvrtcCompiler

    def sources(self) -> dict[str, Sources]:
        """Per entry. Raises FileNotFoundError when an entry or header is missing."""
        entries = dict.fromkeys(spec.entry for spec in self.specs)
        return {entry: read_sources(entry, self.csrc) for entry in entries}


def ninja_program() -> Path:
    """ninja from its Python wheel, which the requirements name: what PATH offers is not asked."""
    import ninja

    return Path(ninja.BIN_DIR, "ninja.exe" if sys.platform == "win32" else "ninja")


def run_ninja(ninja: Path, job: Job, workers: int) -> None:
    """Builds the kernels of a job. What one of them says on failing is printed."""
    # A new folder, which only this user can enter: ninja runs what the graph says.
    with tempfile.TemporaryDirectory(prefix="sparge-") as folder:
        Path(folder, "build.ninja").write_bytes(os.fsencode(write_graph(job)))
        # -k 0: one broken kernel must not hide what the others say.
        command = [str(ninja), "-C", folder, "-j", str(workers), "-k", "0"]
        subprocess.run(command)


def write_graph(job: Job) -> str:
    """The text of ``build.ninja``: an edge a kernel."""
    edge = Path(__file__).with_name("edge.py")
    command = [sys.executable, str(edge), "--csrc", str(job.csrc), "--out", str(job.out)]
    command += ["--nvrtc", str(job.compiler.nvrtc.path)]
    lines = [
        "ninja_required_version = 1.5",
        "rule cubin",
        f"  command = {_dollars(_quoted(command))} $out",
        "  description = $out",
        *(f"build {spec.id}: cubin" for spec in job.specs),
    ]
    return "\n".join(lines) + "\n"


def _quoted(command: list[str]) -> str:
    return subprocess.list2cmdline(command) if sys.platform == "win32" else shlex.join(command)


def _dollars(text: str) -> str:
    return text.replace("$", "$$")

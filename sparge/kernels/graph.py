# SPDX-License-Identifier: Apache-2.0
"""Build many cubins at once: as a ninja graph, one edge each."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .compile import NvrtcCompiler
from .folder import cache_folder, is_private, make_folder, write_whole
from .source import Sources, read_sources
from .spec import KernelSpec
from .store import Store


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


def run_ninja(ninja: Path, job: Job, workers: int) -> bool:
    """Build what is missing or older than its sources; True when every edge succeeded."""
    with _graph_folder(job.out) as folder:
        write_whole(folder / "build.ninja", os.fsencode(write_graph(job)))
        # -k 0: one broken kernel must not hide what the others say.
        command = [str(ninja), "-C", str(folder), "-j", str(workers), "-k", "0"]
        return subprocess.run(command).returncode == 0


def write_graph(job: Job) -> str:
    """The text of ``build.ninja``.

    A cubin's file name holds the hash of its sources and options, so a change of content is a new
    edge; the dependencies let ninja look again when a file was only touched.
    """
    store, sources = Store(job.out), job.sources()
    edge = Path(__file__).with_name("edge.py")
    command = [sys.executable, str(edge), "--csrc", str(job.csrc), "--out", str(job.out)]
    command += ["--nvrtc", str(job.compiler.nvrtc.path)]
    lines = [
        "ninja_required_version = 1.5",
        "rule cubin",
        f"  command = {_dollars(_quoted(command))} $spec",
        "  description = $spec",
        # An edge that finds its cubin complete leaves it alone; that counts as up to date.
        "  restat = 1",
    ]
    for spec in job.specs:
        cubin = store.path(spec, sources[spec.entry], job.compiler)
        assert cubin is not None
        outputs = " ".join(_path(p) for p in (cubin, cubin.with_suffix(".json")))
        inputs = " ".join(_path(p) for p in (*sources[spec.entry].paths, *_build_code()))
        lines += [f"build {outputs}: cubin {inputs}", f"  spec = {spec.id}"]
    return "\n".join(lines) + "\n"


def _build_code() -> list[Path]:
    return [Path(__file__).with_name(f"{name}.py") for name in ("compile", "spec", "params")]


@contextmanager
def _graph_folder(out: Path) -> Iterator[Path]:
    """Outside ``out``, which may be shipped; one graph a folder, so ninja's log stays true.

    ninja runs what the graph says, and writes its log through links: where another user could
    change either, a new folder serves that only this user can enter, without ninja's memory.
    """
    name = hashlib.sha256(os.fsencode(out)).hexdigest()[:16]
    if (cache := cache_folder()) is not None:
        kept = cache / "ninja" / name
        with suppress(OSError):
            make_folder(kept)
        if kept.is_dir() and is_private(kept):
            yield kept
            return
    with tempfile.TemporaryDirectory(prefix="sparge-") as folder:
        yield Path(folder)


def _quoted(command: list[str]) -> str:
    return subprocess.list2cmdline(command) if sys.platform == "win32" else shlex.join(command)


def _dollars(text: str) -> str:
    return text.replace("$", "$$")


def _path(path: Path) -> str:
    return _dollars(str(path)).replace(" ", "$ ").replace(":", "$:")

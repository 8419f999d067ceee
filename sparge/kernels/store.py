# SPDX-License-Identifier: Apache-2.0
"""Cubins on disk: the user's cache, then compile and keep.

An entry is ``<spec id>.<key>.<compiler>.cubin`` and a ``.json`` of the same stem, with its name,
the assembler's words and the cubin's checksum. The JSON is written last, so a cubin without one,
or with one that does not fit, is no entry. Nothing is locked: two writers of one entry write the
same bytes, and each file appears by a rename.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from pathlib import Path

from .cubin import Cubin
from .folder import distrust, make_folder, read_file, why_none, write_whole
from .nvrtc import Nvrtc, options
from .source import Sources
from .spec import KernelSpec

logger = logging.getLogger("sparge")

#: Changes with what the JSON of an entry must say.
_FORMAT = "3"


def entry_stem(spec: KernelSpec, sources: Sources) -> str:
    """File name of an entry up to the compiler: the same text and options give the same stem."""
    facts = f"{_FORMAT} {sources.hash} {' '.join(options(spec))}"
    # 16 hex digits: names stay short for Windows; ids and compilers are in the clear.
    return f"{spec.id}.{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


class Store:
    """Cubins in ``cache``; None: in memory only."""

    def __init__(self, cache: Path | None) -> None:
        self.cache = cache
        self._memory: dict[str, Cubin] = {}
        self._warned = False
        self._once = threading.Lock()

    def path(self, spec: KernelSpec, sources: Sources, nvrtc: Nvrtc) -> Path | None:
        """Path of this cubin in the cache."""
        if self.cache is None:
            return None
        return self.cache / f"{entry_stem(spec, sources)}.{nvrtc.label}.cubin"

    def find(self, spec: KernelSpec, sources: Sources, nvrtc: Nvrtc) -> Cubin | None:
        """A verified cubin that needs no compiling, or None."""
        stem = entry_stem(spec, sources)
        if kept := self._memory.get(f"{stem}.{nvrtc.label}"):
            return kept
        path = self.path(spec, sources, nvrtc)
        return read_entry(path, spec) if path and not self._refused() else None

    def get(self, spec: KernelSpec, sources: Sources, nvrtc: Nvrtc) -> Cubin:
        """``find``, or compile and keep.

        Raises KernelBuildError when it does not compile.
        """
        cubin = self.find(spec, sources, nvrtc)
        if cubin is None:
            cubin = nvrtc.compile(spec, sources)
            self._keep(cubin, spec, sources, nvrtc)
        return cubin

    def _refused(self) -> bool:
        """Whether others could put code into the cache; said once."""
        why = "" if self.cache is None else distrust(self.cache)
        if why:
            self._warn(
                "Compiled kernels are neither read from the cache nor kept for the next start: %s. "
                "Or set SPARGE_CACHE to a folder of your own.",
                why,
            )
        return bool(why)

    def _keep(self, cubin: Cubin, spec: KernelSpec, sources: Sources, nvrtc: Nvrtc) -> None:
        cannot = "Compiled kernels cannot be kept for the next start: %s"
        path = self.path(spec, sources, nvrtc)
        if path is None:
            self._warn(cannot, f"{why_none()}. Set SPARGE_CACHE to a folder of your own.")
        else:
            try:
                make_folder(path.parent)
                if not self._refused():
                    write_entry(path, cubin, spec)
                    self._memory.pop(path.stem, None)
                    return
            except OSError as error:
                why = f"{self.cache}: {error}. Set SPARGE_CACHE to a folder that takes them."
                self._warn(cannot, why)
        self._memory[f"{entry_stem(spec, sources)}.{nvrtc.label}"] = cubin

    def _warn(self, text: str, why: str) -> None:
        with self._once:
            if not self._warned:
                self._warned = True
                logger.warning(text, why)


def read_entry(path: Path, spec: KernelSpec) -> Cubin | None:
    """The kernel of ``spec`` at ``path``, or None when there is none that can be trusted.

    The JSON must be of this name and target and of these bytes, and both files the user's own.
    """
    beside = path.with_suffix(".json")
    try:
        facts = json.loads(read_file(beside))
        image = read_file(path)
        if (facts["name"], facts["target"]) != (path.stem, spec.arch):
            raise ValueError("it is of another name or target")
        if facts["sha256"] != hashlib.sha256(image).hexdigest():
            raise ValueError("its checksum does not fit")
        cubin = Cubin(image, str(facts["log"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("Cached kernel %s is not used, and is built anew: %s", path.name, error)
        return None
    return cubin


def write_entry(path: Path, cubin: Cubin, spec: KernelSpec) -> None:
    """Publish an entry; raises OSError when the folder cannot be written."""
    facts = {
        "name": path.stem,
        "target": spec.arch,
        "sha256": hashlib.sha256(cubin.image).hexdigest(),
        "log": cubin.log,
    }
    _publish(path, cubin.image)
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    _publish(path.with_suffix(".json"), text.encode())


def _publish(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except PermissionError:
        # Windows refuses to replace a file another process has open: it holds these bytes then.
        if not (path.is_file() and path.read_bytes() == data):
            raise

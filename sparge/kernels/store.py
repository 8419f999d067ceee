# SPDX-License-Identifier: Apache-2.0
"""Cubins on disk: the user's cache, then compile and keep.

An entry is ``<spec id>.<key>.<compiler>.cubin`` and a ``.json`` of the same stem, with its name,
the assembler's words and the cubin's checksum. The JSON is written last, so a cubin without one,
or with one that does not fit, is no entry. Nothing is locked: two writers of one entry write the
same bytes, and each file appears by a rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from pathlib import Path

from .compile import Compiler, options_key
from .cubin import Cubin
from .entry import DAY, read_entry, write_entry
from .folder import UNFINISHED, distrust, make_folder, why_none
from .source import Sources
from .spec import KernelSpec

logger = logging.getLogger("sparge")

#: Changes with what the JSON of an entry must say.
_FORMAT = "3"
#: Days after which an entry goes that nobody read.
UNUSED_DAYS = 60


def entry_stem(spec: KernelSpec, sources: Sources) -> str:
    """File name of an entry up to the compiler: the same text and options give the same stem."""
    facts = f"{_FORMAT} {sources.hash} {options_key(spec)}"
    # 16 hex digits: names stay short for Windows; ids and compilers are in the clear.
    return f"{spec.id}.{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


class Store:
    """Cubins in ``cache``; None: in memory only."""

    def __init__(self, cache: Path | None) -> None:
        self.cache = cache
        self._memory: dict[str, Cubin] = {}
        self._warned = self._tidied = False
        self._once = threading.Lock()

    def path(self, spec: KernelSpec, sources: Sources, compiler: Compiler) -> Path | None:
        """Path of this cubin in the cache."""
        if self.cache is None:
            return None
        return self.cache / f"{entry_stem(spec, sources)}.{compiler.label}.cubin"

    def find(self, spec: KernelSpec, sources: Sources, compiler: Compiler) -> Cubin | None:
        """A verified cubin that needs no compiling, or None."""
        stem = entry_stem(spec, sources)
        if kept := self._memory.get(f"{stem}.{compiler.label}"):
            return kept
        path = self.path(spec, sources, compiler)
        return read_entry(path, spec) if path and not self._refused() else None

    def get(
        self, spec: KernelSpec, sources: Sources, compiler: Compiler, anew: bool = False
    ) -> Cubin:
        """``find``, or compile and keep; ``anew`` compiles at any rate.

        Raises KernelBuildError when it does not compile.
        """
        cubin = None if anew else self.find(spec, sources, compiler)
        if cubin is None:
            cubin = compiler.compile(spec, sources)
            self._keep(cubin, spec, sources, compiler)
        self._tidy()
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

    def _keep(self, cubin: Cubin, spec: KernelSpec, sources: Sources, compiler: Compiler) -> None:
        cannot = "Compiled kernels cannot be kept for the next start: %s"
        path = self.path(spec, sources, compiler)
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
        self._memory[f"{entry_stem(spec, sources)}.{compiler.label}"] = cubin

    def _tidy(self) -> None:
        """Removes once entries that were not read for `UNUSED_DAYS`, and files that were never
        finished."""
        with self._once:
            tidied, self._tidied = self._tidied, True
        if self.cache is None or tidied or self._refused():
            return
        oldest = time.time() - UNUSED_DAYS * DAY
        for path in (*self.cache.glob("*.nvrtc*.json"), *self.cache.glob(f"*.nvrtc*{UNFINISHED}")):
            # Another process may tidy up too; its JSON goes first, so none meets half an entry.
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()
                    path.with_suffix(".cubin").unlink(missing_ok=True)

    def _warn(self, text: str, why: str) -> None:
        with self._once:
            if not self._warned:
                self._warned = True
                logger.warning(text, why)

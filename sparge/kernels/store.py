# SPDX-License-Identifier: Apache-2.0
"""Cubins on disk: ``prebuilt/`` first, then the user's cache, then compile and keep.

An entry is ``<spec id>.<key>.<compiler>.cubin`` and a ``.json`` of the same stem, with the
assembler's report and the cubin's checksum. The JSON is written last, so a cubin without one, or
with one that does not fit, is no entry. Nothing is locked: two writers of one entry write the same
bytes, and each file appears by a rename.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
from pathlib import Path

from .compile import Compiler, options_key
from .cubin import Cubin
from .report import Report, dump
from .source import Sources, find_csrc
from .spec import KernelSpec

logger = logging.getLogger("sparge")


def cache_folder() -> Path | None:
    """``SPARGE_CACHE``, or ``sparge`` in the user's cache folder; None without a home."""
    if chosen := os.environ.get("SPARGE_CACHE"):
        return Path(chosen)
    try:
        if sys.platform == "win32":
            local = os.environ.get("LOCALAPPDATA")
            base = Path(local) if local else Path.home() / "AppData" / "Local"
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "sparge"


def prebuilt_folder() -> Path:
    """Where a release may ship cubins: beside csrc. It need not exist."""
    return find_csrc().parent / "prebuilt"


def entry_stem(spec: KernelSpec, sources: Sources) -> str:
    """File name of an entry up to the compiler: the same text and options give the same stem."""
    facts = f"{sources.hash} {options_key(spec)}"
    # 16 hex digits: names stay short for Windows; ids and compilers are in the clear.
    return f"{spec.id}.{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


class Store:
    """Cubins in ``cache`` (None: in memory only), after those in ``prebuilt``."""

    def __init__(self, cache: Path | None, prebuilt: Path | None = None) -> None:
        self.cache = cache
        self.prebuilt = prebuilt
        self._memory: dict[str, Cubin] = {}
        self._warned = False
        self._warning = threading.Lock()

    def path(self, spec: KernelSpec, sources: Sources, compiler: Compiler) -> Path | None:
        """Where this cubin is kept in the cache."""
        if self.cache is None:
            return None
        return self.cache / f"{entry_stem(spec, sources)}.{compiler.label}.cubin"

    def find(self, spec: KernelSpec, sources: Sources, compiler: Compiler) -> Cubin | None:
        """A verified cubin that needs no compiling, or None."""
        stem = entry_stem(spec, sources)
        if kept := self._memory.get(f"{stem}.{compiler.label}"):
            return kept
        path = self.path(spec, sources, compiler)
        return self._find_prebuilt(stem, compiler) or (read_entry(path) if path else None)

    def get(self, spec: KernelSpec, sources: Sources, compiler: Compiler) -> Cubin:
        """``find``, or compile and keep. Raises KernelBuildError when it does not compile."""
        cubin = self.find(spec, sources, compiler)
        if cubin is None:
            cubin = compiler.compile(spec, sources)
            self._keep(cubin, entry_stem(spec, sources), compiler)
        return cubin

    def _find_prebuilt(self, stem: str, compiler: Compiler) -> Cubin | None:
        if self.prebuilt is None:
            return None
        for path in sorted(self.prebuilt.glob(f"{stem}.*.cubin")):
            cubin = read_entry(path)
            # A driver refuses cubins of a newer CUDA major; the local compiler fits the driver.
            if cubin and _major(path) <= compiler.version[0]:
                return cubin
        return None

    def _keep(self, cubin: Cubin, stem: str, compiler: Compiler) -> None:
        name = f"{stem}.{compiler.label}"
        if self.cache is not None:
            try:
                write_entry(self.cache / f"{name}.cubin", cubin)
                return
            except OSError as error:
                self._warn(f"{self.cache}: {error}. Set SPARGE_CACHE to a folder with free space.")
        else:
            self._warn("this user has no cache folder. Set SPARGE_CACHE to one.")
        self._memory[name] = cubin

    def _warn(self, why: str) -> None:
        with self._warning:
            if not self._warned:
                self._warned = True
                logger.warning("Compiled kernels cannot be kept for the next start: %s", why)


def read_entry(path: Path) -> Cubin | None:
    """The entry at ``path``, or None when it is absent or fails its checksum."""
    try:
        facts = json.loads(path.with_suffix(".json").read_bytes())
        image = path.read_bytes()
        if facts["sha256"] != hashlib.sha256(image).hexdigest():
            raise ValueError("its checksum does not fit")
        report = facts["report"]
        return Cubin(image, None if report is None else Report.from_json(report))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("Cached kernel %s is damaged and is built anew: %s", path.name, error)
        return None


def write_entry(path: Path, cubin: Cubin) -> None:
    """Publish an entry; raises OSError when the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = None if cubin.report is None else cubin.report.to_json()
    facts = {"sha256": hashlib.sha256(cubin.image).hexdigest(), "report": report}
    _publish(path, cubin.image)
    _publish(path.with_suffix(".json"), dump(facts))


def _publish(path: Path, data: bytes) -> None:
    unique = f"{os.getpid()}-{threading.get_ident()}"
    beside = path.with_name(f"{path.name}.{unique}.tmp")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    except PermissionError:
        # Windows refuses to replace a file another process has open: it holds these bytes then.
        if not (path.is_file() and path.read_bytes() == data):
            raise
    finally:
        beside.unlink(missing_ok=True)


def _major(path: Path) -> int:
    """CUDA major version out of ``...nvrtc13.0.cubin``."""
    label = path.name.split(".", 2)[2]
    digits = label.removeprefix("nvrtc").removeprefix("nvcc").split(".")[0]
    return int(digits) if digits.isdigit() else sys.maxsize

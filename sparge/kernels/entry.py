# SPDX-License-Identifier: Apache-2.0
"""One cubin on disk, with a ``.json`` of the same stem that says what it is."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from pathlib import Path

from .cubin import Cubin
from .folder import make_folder, read_file, write_whole
from .spec import KernelSpec

logger = logging.getLogger("sparge")

DAY = 24 * 3600.0


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
    _note_use(beside)
    return cubin


def write_entry(path: Path, cubin: Cubin, spec: KernelSpec) -> None:
    """Publish an entry; raises OSError when the folder cannot be written."""
    make_folder(path.parent)
    facts = {
        "name": path.stem,
        "target": spec.arch,
        "sha256": hashlib.sha256(cubin.image).hexdigest(),
        "log": cubin.log,
    }
    _publish(path, cubin.image)
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    _publish(path.with_suffix(".json"), text.encode())


def _note_use(path: Path) -> None:
    """Dates an entry that is used, at most once a day: the store removes old ones."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY:
            os.utime(path)


def _publish(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except PermissionError:
        # Windows refuses to replace a file another process has open: it holds these bytes then.
        if not (path.is_file() and path.read_bytes() == data):
            raise

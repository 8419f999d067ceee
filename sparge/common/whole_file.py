# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole: a reader meets the old one or the new one, never half of one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

#: End of the name of a file that is being written; what was killed leaves one behind.
UNFINISHED = ".part"
#: Mode of new files: everybody may read, as far as the umask lets them.
_MODE = 0o644
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file that takes the place of `path` once it is complete, links included.

    Nothing is left where the body raises. Raises OSError where the folder cannot be written, and
    PermissionError on Windows while somebody has `path` open.
    """
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    handle = os.open(beside, _NEW_FILE, _MODE)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Writes all of `data`, as in `written_whole`."""
    with written_whole(path) as file:
        file.write(data)

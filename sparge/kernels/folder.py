# SPDX-License-Identifier: Apache-2.0
"""The user's cache folder, files that appear whole in it, and whether other users could put code of
theirs into a folder."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from pathlib import Path

#: Whatever the umask, only the owner writes.
_MODE = 0o755
_READABLE = 0o644
#: End of the name of a file that is being written; what was killed leaves one behind.
UNFINISHED = ".part"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_WRITE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path | None:
    """``SPARGE_CACHE``, or ``sparge`` in the user's cache folder; None without a home."""
    try:
        if chosen := os.environ.get("SPARGE_CACHE"):
            return Path(chosen).expanduser().absolute()
        base = _base()
    except RuntimeError:  # no home for ~
        return None
    return None if base is None else base / "sparge"


def why_none() -> str:
    """Reason why there is no cache folder."""
    if chosen := os.environ.get("SPARGE_CACHE"):
        return f"SPARGE_CACHE is {chosen}, and there is no such home"
    return "this user has no home folder"


def _base() -> Path | None:
    if sys.platform == "win32":
        return _absolute("LOCALAPPDATA") or _in_home("AppData", "Local")
    return _absolute("XDG_CACHE_HOME") or _in_home(".cache")


def _absolute(variable: str) -> Path | None:
    """Folder that an environment variable names; a relative one would be another for every working
    folder."""
    path = Path(os.environ.get(variable, ""))
    return path if path.is_absolute() else None


def _in_home(*names: str) -> Path | None:
    home = Path.home()
    return home.joinpath(*names) if home.is_absolute() else None


def make_folder(folder: Path) -> None:
    """Makes ``folder`` where it is missing. Raises OSError."""
    folder.mkdir(mode=_MODE, parents=True, exist_ok=True)


def distrust(folder: Path) -> str:
    """Reason why other users could put code of theirs into ``folder``: the start of a sentence,
    empty where they cannot, and where there is no folder yet."""
    try:
        link, target = os.lstat(folder), os.stat(folder)
    except OSError:
        return ""  # whoever reads or writes there meets it again
    if not stat.S_ISDIR(target.st_mode):
        return ""
    if why := _belongs_to_another(link, folder) or _belongs_to_another(target, folder):
        return why
    why = _is_open(target, folder)
    return f"{why}: run chmod go-w on it" if why else ""


def _belongs_to_another(status: os.stat_result, name: object) -> str:
    """Windows has no such owners and modes, and closes a user's folders to others."""
    if not hasattr(os, "geteuid") or status.st_uid == os.geteuid():
        return ""
    return f"{name} belongs to another user (uid {status.st_uid})"


def _is_open(status: os.stat_result, name: object) -> str:
    if not hasattr(os, "geteuid") or not status.st_mode & _WRITE_BY_OTHERS:
        return ""
    return f"other users may write to {name}"


def read_file(path: Path) -> bytes:
    """Bytes of a file. Raises OSError, and ValueError where another user may write to it."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())  # of the open file: nobody can put another in its place
        if why := _belongs_to_another(status, "it") or _is_open(status, "it"):
            raise ValueError(why)
        return file.read()


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that appears whole: a reader meets the old one or the new one, never half.

    Nothing is left of what fails. Raises OSError where the folder cannot be written, and
    PermissionError on Windows while somebody has `path` open.
    """
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    handle = os.open(beside, _NEW_FILE, _READABLE)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise

# SPDX-License-Identifier: Apache-2.0
"""Removal from a cache of what nobody needs any more: old entries, and unfinished files."""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

from .entry import DAY
from .folder import UNFINISHED

UNUSED_DAYS = 60
UNFINISHED_DAYS = 1
#: Up to the suffix: the id of a spec, a hash, a compiler.
_ENTRY = re.compile(r"([a-z0-9_-]+\.[0-9a-f]{16})\.nvrtc\d+\.\d+")
#: ``.tmp`` ended the names that earlier versions wrote first.
_BEGUN = re.compile(rf".+\.(?:cubin|json)\.[^.]+(?:\.tmp|{re.escape(UNFINISHED)})")


def remove_stale(folder: Path, is_current: Callable[[str], bool]) -> list[Path]:
    """Removes entries that were not read for `UNUSED_DAYS` and that ``is_current`` does not know by
    their stem, and unfinished files of another day; returns them. Foreign files stay.

    An entry's JSON goes first, so that no reader meets half an entry; whoever has read it has it.
    Never raises for what cannot be removed.
    """
    now, gone = time.time(), []
    dates = _dates(folder)
    for name, date in dates.items():
        if _BEGUN.fullmatch(name) and now - date > UNFINISHED_DAYS * DAY:
            gone.append(folder / name)
    for stem in {_stem(name) for name in dates}:
        if (match := _ENTRY.fullmatch(stem)) is None:
            continue
        files = [name for name in (f"{stem}.json", f"{stem}.cubin") if name in dates]
        unused = now - max(dates[name] for name in files) > UNUSED_DAYS * DAY
        if unused and not is_current(match[1]):
            gone += [folder / name for name in files]
    return [path for path in gone if _remove(path)]


def _stem(name: str) -> str:
    return name.removesuffix(".json") if name.endswith(".json") else name.removesuffix(".cubin")


def _dates(folder: Path) -> dict[str, float]:
    """Time when each file of ``folder`` was written or, an entry, last used."""
    dates = {}
    try:
        for path in folder.iterdir():
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                dates[path.name] = status.st_mtime
    except OSError:  # somebody else tidies up too; the next start goes on
        return {}
    return dates


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True

# SPDX-License-Identifier: Apache-2.0
"""Device sources as text: an entry file with every header it includes, and their hash."""

from __future__ import annotations

import hashlib
import posixpath
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)"([^"\n]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Sources:
    """An entry file and its include closure; names are relative to the sources' folder, with ``/``.

    Include directives in the texts are rewritten to such names, so a header reached by two
    spellings is one header to the compiler, and no folder has to exist when it runs.
    """

    name: str
    text: str
    headers: dict[str, str]

    @cached_property
    def hash(self) -> str:
        digest = hashlib.sha256()
        for name, text in sorted({self.name: self.text, **self.headers}.items()):
            # Lengths keep two different splits of the same bytes apart.
            digest.update(f"{len(name)} {len(text)} {name}\n{text}".encode())
        return digest.hexdigest()


def find_csrc() -> Path:
    """The folder of CUDA sources: inside an installed library, beside it in the node pack.

    Raises FileNotFoundError when the installation has neither.
    """
    library = Path(__file__).resolve().parents[1]
    # Inside comes first: beside an installed library lies whatever else site-packages holds.
    for folder in (library / "csrc", library.parent / "csrc"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"The CUDA sources are missing: expected csrc in {library} or in {library.parent}. "
        "Reinstall the pack."
    )


def read_sources(entry: str, root: Path | None = None) -> Sources:
    """``<entry>.cu`` under ``root`` (default: the pack's csrc) with all it includes.

    Raises FileNotFoundError for a file that is missing and names who includes it.
    """
    root = find_csrc() if root is None else root
    name = f"{entry}.cu"
    headers: dict[str, str] = {}
    text = _read(root, name, "the kernel list", headers)
    return Sources(name, text, dict(sorted(headers.items())))


def _read(root: Path, name: str, reader: str, headers: dict[str, str]) -> str:
    try:
        # Universal newlines: a Windows checkout has the same text and the same hash.
        text = (root / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"csrc has no {name}, which {reader} asks for") from None

    def canonical(match: re.Match[str]) -> str:
        header = _resolve(root, name, match[2])
        if header not in headers:
            headers[header] = ""  # claimed before it is read: a cycle ends here
            headers[header] = _read(root, header, name, headers)
        return f'{match[1]}"{header}"'

    return _INCLUDE.sub(canonical, text)


def _resolve(root: Path, includer: str, spelled: str) -> str:
    """Path of an include as a compiler with ``-I root`` finds it: beside the including file first,
    then from root."""
    beside = posixpath.normpath(posixpath.join(posixpath.dirname(includer), spelled))
    return beside if (root / beside).is_file() else posixpath.normpath(spelled)

# SPDX-License-Identifier: Apache-2.0
"""The library's version. pyproject.toml has it, where ComfyUI-Manager and the registry read it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

_NAME = "sparge-attention"


def _version() -> str:
    """Version of the node pack or clone that this folder lies in, else of the installed library."""
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    text = project.read_text(encoding="utf-8") if project.is_file() else ""
    if found := re.search(rf'^name = "{_NAME}"\nversion = "(.+)"$', text, re.MULTILINE):
        return found[1]
    try:
        return metadata.version(_NAME)
    except metadata.PackageNotFoundError:  # a copy of the folder alone
        return "unknown"


__version__ = _version()

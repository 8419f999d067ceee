# SPDX-License-Identifier: Apache-2.0
"""Says what a release still lacks, a sentence each, and fails while anything does.

python -m tools.release [--tag v0.1.0]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "OWNER"
#: Width over height that the registry asks of its pictures.
SHAPES = {"icon.png": 1.0, "banner.png": 21 / 9}
#: Bytes of the first lines of a PNG file that hold its size.
_PNG_SIZE = slice(16, 24)


def problems(root: Path, tag: str = "") -> Iterator[str]:
    """Yields what is wrong with the checkout `root`. tag: that of a release, if any."""
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    for path in [root / "pyproject.toml", *sorted((root / "web" / "docs").rglob("*.md"))]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if PLACEHOLDER in line and not line.lstrip().startswith("#"):
                yield (
                    f"{path.relative_to(root).as_posix()}, line {number}, still says "
                    f"{PLACEHOLDER}: write the account that publishes."
                )
    address = _first(r'^Repository = "([^"]+)"$', project)
    if f"git clone {address} " not in (root / "README.md").read_text(encoding="utf-8"):
        yield f"README.md does not say how to clone {address}: write it into the command."
    version = _first(r'^version = "([^"]+)"$', project)
    changed = _first(r"^## (\S+)", (root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if changed != version:
        yield f"The version is {version}, and CHANGELOG.md begins with {changed}: make them one."
    if tag and tag != f"v{version}":
        yield f"The tag is {tag} and the version {version}: the tag of it is v{version}."
    for name, shape in SHAPES.items():
        yield from _picture_problems(root / "assets" / name, shape)


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else "nothing"


def _picture_problems(path: Path, shape: float) -> Iterator[str]:
    where = f"assets/{path.name}"
    if not path.is_file():
        yield f"{where} is missing: python -m tools.pictures draws it."
        return
    sizes = path.read_bytes()[_PNG_SIZE]
    width, height = int.from_bytes(sizes[:4], "big"), int.from_bytes(sizes[4:], "big")
    if not height or abs(width / height - shape) > 0.01:
        shown = f"{shape:.3g} times as wide as high"
        yield f"{where} is {width}x{height}; the registry shows it {shown}."


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tag", default="")
    found = list(problems(ROOT, parser.parse_args(arguments).tag))
    print("\n".join(found) or "Ready to be published.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What keeps a release from being published, and the pictures of the registry."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tools import pictures, release

ROOT = release.ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose placeholders somebody filled in."""
    for name in ("CHANGELOG.md", "assets"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    filled = project.replace(release.PLACEHOLDER, "somebody")
    (tmp_path / "pyproject.toml").write_text(filled, encoding="utf-8")
    return tmp_path


def told(checkout: Path, tag: str = "") -> str:
    return "\n".join(release.problems(checkout, tag))


def test_nothing_is_missing_but_the_account(checkout: Path, capsys) -> None:
    assert told(checkout) == "" == told(checkout, "v0.1.0")
    assert release.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all("still says OWNER" in line for line in lines)
    of_the_project = [line for line in lines if line.startswith("pyproject.toml")]
    assert len(of_the_project) == 6, "the others are links on help pages"


def test_what_is_missing_is_said(checkout: Path) -> None:
    assert told(checkout, "v9.0.0") == (
        "The tag is v9.0.0 and the version 0.1.0: the tag of it is v0.1.0."
    )
    changes = checkout / "CHANGELOG.md"
    changes.write_text("# Changelog\n\n## 0.2.0\n", encoding="utf-8")
    assert told(checkout) == (
        "The version is 0.1.0, and CHANGELOG.md begins with 0.2.0: make them one."
    )
    shutil.copy(ROOT / "CHANGELOG.md", changes)
    shutil.copy(checkout / "assets" / "icon.png", checkout / "assets" / "banner.png")
    (checkout / "assets" / "icon.png").unlink()
    missing, wrong = told(checkout).splitlines()
    assert missing == "assets/icon.png is missing: python -m tools.pictures draws it."
    assert wrong.startswith("assets/banner.png is 400x400; the registry shows it 2.33 times")


#: Pictures of the README, and the most bytes that each may take.
SHOWN = {"assets/dense_and_sparse.webp": 600_000, "assets/node.png": 120_000}


def test_pictures_of_the_readme_are_small_and_in_the_archive() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"!\[[^]]+\]\((.+?)\)", readme) == list(SHOWN)
    assert all((ROOT / path).stat().st_size <= most for path, most in SHOWN.items())
    assert "assets" not in (ROOT / ".comfyignore").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["icon", "banner"])
def test_the_pictures_are_what_the_script_draws(name: str) -> None:
    drawn, kept = getattr(pictures, name)(), Image.open(ROOT / "assets" / f"{name}.png")
    assert kept.size == drawn.size
    # Letters differ a little between versions of Pillow.
    histogram = Image.blend(drawn, kept.convert("RGB"), 0.5).getcolors(1 << 24)
    assert histogram and {pictures.PAPER, pictures.SKIPPED} <= {colour for _, colour in histogram}

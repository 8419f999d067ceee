# SPDX-License-Identifier: Apache-2.0
"""The archive that the ComfyUI registry serves, made by comfy-cli as `comfy node publish` makes it.

comfy-cli is no requirement of the tests, because it brings 300 MB of programs that nothing else
needs. It is found on PATH, in an environment of its own that COMFY_CLI names (the program `comfy`),
or nowhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMFY = os.environ.get("COMFY_CLI") or shutil.which("comfy")
WHY_NOT = ("" if COMFY else "needs comfy-cli; name its program `comfy` in COMFY_CLI") or (
    "" if (ROOT / ".git").exists() else "needs a checkout of git"
)

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

#: Folders of which each file is used by somebody.
WHOLE = (*("assets", "csrc", "nodes", "shim", "sparge", "subgraphs", "web", "workflows"),)
#: The rest, but for translations.
SINGLE = {
    *("__init__.py", "install.py", "pyproject.toml", "requirements.txt"),
    *("LICENSE", "README.md", "CHANGELOG.md"),
    *("docs/guide.md", "docs/how-it-works.md", "docs/library.md"),
    *("docs/hosts/diffusers.md", "docs/hosts/parallel.md"),
    *("docs/hosts/pytorch.md", "docs/hosts/transformers.md"),
}
#: Bytes; the archive is downloaded at every update.
MOST = 1_500_000


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def tracked(folder: Path, *paths: str) -> set[str]:
    return set(filter(None, git(folder, "ls-files", "-z", *paths).split("\0")))


def working_tree(folder: Path) -> Path:
    """What a clone would hold were the working tree committed."""
    git(folder, "init", "--quiet")
    for name in tracked(ROOT, "--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "add", "--all")
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return working_tree(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def comfy(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Runs `comfy node` with a word in the checkout. It must not send or keep anything."""
    home = str(tmp_path_factory.mktemp("home"))
    private = {"DO_NOT_TRACK": "1", "HOME": home, "USERPROFILE": home, "XDG_CONFIG_HOME": home}

    def run(word: str) -> str:
        command = [str(COMFY), "--skip-prompt", "node", word]
        done = subprocess.run(
            command, cwd=checkout, env=os.environ | private, capture_output=True, text=True
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        return said

    return run


@pytest.fixture(scope="module")
def archive(comfy: Callable[[str], str], checkout: Path) -> Path:
    comfy("pack")
    return checkout / "node.zip"


@pytest.fixture(scope="module")
def unpacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(archive, folder)
    return folder


def test_the_registry_validates_the_pack(comfy: Callable[[str], str]) -> None:
    said = comfy("validate")
    assert "All validation checks passed" in said, said
    assert "arning" not in said


def test_the_archive_holds_what_a_user_runs_and_nothing_else(archive: Path, checkout: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        assert opened.testzip() is None
        packed = set(opened.namelist())
    translations = {name for name in tracked(checkout, "locales") if name.count("/") == 2}
    assert packed == tracked(checkout, *WHOLE) | SINGLE | translations
    assert archive.stat().st_size < MOST


def test_the_unpacked_archive_installs_and_imports(unpacked: Path) -> None:
    """ComfyUI's own modules apart, which tests/comfy has."""
    modules = [
        ".".join(path.relative_to(unpacked).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((unpacked / "sparge").rglob("*.py"))
        if path.stem != "__main__"
    ]
    code = f"""
import importlib, sys; sys.path.insert(0, {str(unpacked)!r})
for name in {modules!r}: importlib.import_module(name)
from sparge.kernels.source import find_csrc, read_sources
print(find_csrc(), len(read_sources("attend").headers))"""
    for command in (["-I", "install.py"], ["-I", "-c", code]):
        done = subprocess.run(
            [sys.executable, *command], cwd=unpacked, capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stderr == "", done.stderr
    folder, headers = done.stdout.split()
    assert Path(folder) == unpacked / "csrc" and int(headers) > 0

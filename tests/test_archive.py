# SPDX-License-Identifier: Apache-2.0
"""The archive that the ComfyUI registry serves, as `comfy node publish` makes it: what git tracks,
but for what .comfyignore names."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout of git")

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


def tracked(*options: str) -> set[str]:
    done = subprocess.run(
        ["git", "ls-files", "-z", *options], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return {name for name in done.stdout.split("\0") if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def packed() -> set[str]:
    return tracked() - tracked("--cached", "--ignored", "--exclude-from=.comfyignore")


def test_it_holds_what_a_user_runs_and_nothing_else(packed: set[str], tmp_path: Path) -> None:
    translations = {name for name in tracked("locales") if name.count("/") == 2}
    assert packed == tracked(*WHOLE) | SINGLE | translations
    with zipfile.ZipFile(tmp_path / "node.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in packed:
            archive.write(ROOT / name, name)
    assert (tmp_path / "node.zip").stat().st_size < MOST


def test_unpacked_it_installs_and_imports_and_loads_no_more_than_it_needs(
    packed: set[str], tmp_path: Path
) -> None:
    """ComfyUI's own modules apart, which tests/comfy has. Kernels load no native library before a
    call does. The integration with diffusers knows pipelines by their attributes alone."""
    for name in packed:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    code = f"""
import ctypes, sys, torch; sys.path.insert(0, {str(tmp_path)!r})
loads, ctypes.CDLL = ctypes.CDLL, None
import sparge.kernels
ctypes.CDLL = loads
import sparge.compat.autotune, sparge.integrations.diffusers, sparge.session
assert "diffusers" not in sys.modules and not torch.cuda.is_initialized()
from sparge.kernels.source import find_csrc, read_sources
print(find_csrc(), len(read_sources("attend").headers))"""
    for command in (["-I", "install.py"], ["-I", "-c", code]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stderr == "", done.stderr
    folder, headers = done.stdout.split()
    assert Path(folder) == tmp_path / "csrc" and int(headers) > 0

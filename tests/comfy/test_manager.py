# SPDX-License-Identifier: Apache-2.0
"""The first use by ComfyUI-Manager: install from git, restart, graphs in the list.

Everything but the click: the Manager's own program clones the pack, as its window does with the
URL of a repository, and runs its install.py. What install.py needs is there, so no package index is
asked; tests/test_package.py has the rules for requirements.txt.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACK = Path(__file__).resolve().parents[2]
WHY_NOT = (
    "needs the Python package comfyui_manager, of ComfyUI's manager_requirements.txt"
    if importlib.util.find_spec("comfyui_manager") is None
    else ""
    if (PACK / ".git").exists()
    else "needs a checkout of git"
)

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

NAME = "sparge-attention"


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare one, with the working tree as its only commit."""
    folder, bare = (tmp_path_factory.mktemp(name) for name in ("tree", "bare"))
    git(folder, "init", "--quiet")
    for name in git(PACK, "ls-files", "-z", "-c", "-o", "--exclude-standard").split("\0"):
        if (PACK / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PACK / name, folder / name)
    git(folder, "add", "--all")
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    git(folder, *who, "commit", "--quiet", "--message", "all")
    git(folder, "clone", "--quiet", "--bare", str(folder), str(bare / f"{NAME}.git"))
    return bare / f"{NAME}.git"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ComfyUI without custom nodes: its code alone."""
    own = shutil.ignore_patterns(".git", "__pycache__", "custom_nodes", "models", "user", "output")
    folder = tmp_path_factory.mktemp("fresh") / "ComfyUI"
    shutil.copytree(os.environ["COMFYUI_DIR"], folder, ignore=own)
    (folder / "custom_nodes").mkdir()
    return folder


@pytest.fixture(scope="module")
def said(fresh: Path, repository: Path, comfyui_env: dict[str, str]) -> str:
    """Output of the Manager while it installed the pack."""
    url = f"file://localhost{repository.as_posix()}"
    command = [sys.executable, "-m", "cm_cli", "install", url, "--mode", "local", "--no-deps"]
    env = comfyui_env | {"COMFYUI_PATH": str(fresh), "HOME": str(fresh), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=fresh, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server(said: str, fresh: Path, start_server: Any, comfyui_env: dict[str, str]) -> Any:
    """ComfyUI after the restart."""
    return start_server(fresh, comfyui_env, flags=("--cpu", "--enable-manager"))


def test_the_manager_installs_the_pack_and_runs_its_script(said: str, fresh: Path) -> None:
    assert "Installation was successful." in said, said
    assert "install.py" in said and "[Sparge]" in said, "what install.py says is shown"
    assert (fresh / "custom_nodes" / NAME / "nodes" / "sparge_attention.py").is_file()


def test_the_manager_knows_it_and_its_graphs_are_listed(server: Any) -> None:
    installed = server.get("/v2/customnode/installed")
    assert installed[NAME]["enabled"]
    graphs = {path.stem for path in (PACK / "workflows").glob("*.json")}
    assert set(server.get("/workflow_templates")[NAME]) == graphs

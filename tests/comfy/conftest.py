# SPDX-License-Identifier: Apache-2.0
"""Real ComfyUI in processes of its own: its names (nodes, comfy, tests) are taken here.

COMFYUI_DIR names a checkout whose requirements the running Python has. Where torchvision and
torchaudio have no CPU build, COMFY_HEADLESS names a folder whose make_stubs.py writes stand-ins.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.comfy.server import TIMEOUT, Server

HERE = Path(__file__).parent
PACK = HERE.parent.parent

#: A dash, because the folder's name becomes the module's name and users choose it.
FOLDER_NAME = "my-sparge-attention"

COMPILERS = ("nvcc", "gcc", "g++", "cc", "clang", "cl", "ninja")


def why_no_comfyui() -> str:
    """Reason why it cannot run; empty where it can."""
    folder = os.environ.get("COMFYUI_DIR")
    if not folder:
        return "needs ComfyUI; name a checkout in COMFYUI_DIR"
    if not (Path(folder) / "comfy").is_dir():
        return f"COMFYUI_DIR names {folder}, which holds no ComfyUI"
    for module in ("aiohttp", "torchsde", "transformers"):
        if importlib.util.find_spec(module) is None:
            return f"ComfyUI's requirement {module} is not installed"
    if importlib.util.find_spec("torchvision") is None and "COMFY_HEADLESS" not in os.environ:
        return "ComfyUI needs torchvision, or stand-ins from COMFY_HEADLESS"
    return ""


def environment_of_comfyui(stubs: Path) -> dict[str, str]:
    """The environment, with stand-ins in the folder ``stubs`` where they are needed."""
    paths = [os.environ["COMFYUI_DIR"], os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("torchvision") is None:
        maker = Path(os.environ["COMFY_HEADLESS"]) / "make_stubs.py"
        subprocess.run([sys.executable, str(maker), str(stubs)], check=True, capture_output=True)
        paths.insert(0, str(stubs))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_comfyui()
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.comfy)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def comfyui_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment for a ComfyUI process that may run the reference instead of kernels. Of tiny
    tensors more threads than one would only wait for each other."""
    extra = {"SPARGE_REFERENCE": "1", "OMP_NUM_THREADS": "1"}
    return environment_of_comfyui(tmp_path_factory.mktemp("stubs")) | extra


@pytest.fixture(scope="session")
def base_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ComfyUI base directory with a copy of this pack in custom_nodes."""
    base = tmp_path_factory.mktemp("base")
    shutil.copytree(
        PACK,
        base / "custom_nodes" / FOLDER_NAME,
        ignore=shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks", "build", "dist"),
    )
    return base


@pytest.fixture(scope="session")
def pack_folder() -> str:
    return FOLDER_NAME


class Worker:
    """A process with ComfyUI and the pack loaded, which runs functions of scenarios.py."""

    def __init__(self, base: Path, env: dict[str, str]) -> None:
        self.base = base
        self.log_path = base / "worker.log"
        self._log = self.log_path.open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(base), FOLDER_NAME, str(PACK)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def run(self, scenario: str, **kwargs: Any) -> Any:
        """The scenario's result. Raises AssertionError with the worker's traceback if it raised."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([scenario, kwargs]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the worker died:\n{self.log_path.read_text()[-4000:]}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def sampled(self, name: str, *widgets: dict[str, Any] | None, **options: Any) -> list[Any]:
        return self.run("sampled", name=name, widgets=widgets, **options)

    def close(self) -> None:
        self._process.communicate(timeout=TIMEOUT)
        self._log.close()


@pytest.fixture(scope="session")
def comfyui(base_directory: Path, comfyui_env: dict[str, str]) -> Iterator[Worker]:
    worker = Worker(base_directory, comfyui_env)
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def tiny_nodes(base_directory: Path) -> Path:
    """The base directory, with the test nodes of tests.comfy.graphs in custom_nodes."""
    helper = base_directory / "custom_nodes" / "tiny_nodes"
    shutil.copytree(HERE / "tiny_nodes", helper)
    shutil.copy(HERE / "models.py", helper)
    return base_directory


@pytest.fixture(scope="session")
def no_toolchain(
    comfyui_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """An environment in which no compiler is found and importing triton fails."""
    empty = tmp_path_factory.mktemp("empty_path")
    broken = tmp_path_factory.mktemp("no_triton")
    (broken / "triton").mkdir()
    (broken / "triton" / "__init__.py").write_text("raise ImportError('hidden by the test')\n")
    assert not any(shutil.which(name, path=str(empty)) for name in COMPILERS)
    python_path = os.pathsep.join([str(broken), comfyui_env["PYTHONPATH"]])
    return comfyui_env | {"PATH": str(empty), "PYTHONPATH": python_path, "CUDA_HOME": str(empty)}


@pytest.fixture(scope="module")
def start_server() -> Iterator[Callable[..., Server]]:
    """Starts servers that stop when the module's tests are over."""
    servers: list[Server] = []

    def start(
        base: Path,
        env: dict[str, str],
        flags: Sequence[str] = ("--cpu",),
        front_end: Path | None = None,
    ) -> Server:
        servers.append(Server(base, env, flags, front_end))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder

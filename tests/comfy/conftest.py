# SPDX-License-Identifier: Apache-2.0
"""Real ComfyUI in processes of its own: its top-level names (nodes, comfy, tests) are taken here.

COMFYUI_DIR names a checkout whose requirements the running Python has. Where torchvision and
torchaudio have no CPU build, COMFY_HEADLESS names a folder whose make_stubs.py writes stand-ins.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PACK = HERE.parent.parent

#: A dash, because the folder's name becomes the module's name and users choose it.
FOLDER_NAME = "my-sparge-attention"

#: Seconds for the slowest scenario (a cold import of ComfyUI is a third of it).
TIMEOUT = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _missing()
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.comfy)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _missing() -> str:
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


@pytest.fixture(scope="session")
def comfyui_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment for a ComfyUI process that may run the reference instead of kernels."""
    paths = [os.environ["COMFYUI_DIR"], os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("torchvision") is None:
        stubs = tmp_path_factory.mktemp("stubs")
        maker = Path(os.environ["COMFY_HEADLESS"]) / "make_stubs.py"
        subprocess.run([sys.executable, str(maker), str(stubs)], check=True, capture_output=True)
        paths.insert(0, str(stubs))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SPARGE_REFERENCE": "1",
        # Tiny tensors: more threads would only wait for each other.
        "OMP_NUM_THREADS": "1",
    }


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
    """A process with ComfyUI and the pack loaded, which runs functions of *_scenarios.py."""

    def __init__(self, base: Path, env: dict[str, str]) -> None:
        self.base = base
        self.log_path = base / "worker.log"
        self._log = self.log_path.open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(base), FOLDER_NAME],
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

    def close(self) -> None:
        self._process.communicate(timeout=TIMEOUT)
        self._log.close()


@pytest.fixture(scope="session")
def comfyui(base_directory: Path, comfyui_env: dict[str, str]) -> Iterator[Worker]:
    worker = Worker(base_directory, comfyui_env)
    yield worker
    worker.close()


class Server:
    """A real ComfyUI server on the CPU."""

    def __init__(self, base: Path, env: dict[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log_path = base / "server.log"
        page = base / "page"
        page.mkdir(exist_ok=True)
        (page / "index.html").write_text("<html></html>")
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "main.py", "--cpu", "--listen", "127.0.0.1"),
                    *("--port", str(port), "--base-directory", str(base)),
                    *("--front-end-root", str(page), "--database-url", "sqlite:///:memory:"),
                    *("--disable-api-nodes", "--cache-none"),
                ],
                cwd=os.environ["COMFYUI_DIR"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + TIMEOUT
        while not self._answers():
            assert self._process.poll() is None, f"the server died:\n{self.log()[-4000:]}"
            assert time.monotonic() < deadline, f"no answer from the server:\n{self.log()[-4000:]}"
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            self.get("/system_stats")
        except OSError:
            return False
        return True

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def get(self, path: str) -> Any:
        """The answer, decoded when it is JSON."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            body = answer.read().decode()
            return json.loads(body) if answer.headers.get_content_subtype() == "json" else body

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def run_graph(self, prompt: dict[str, Any]) -> list[tuple[str, str]]:
        """Queues the graph, waits for its end; returns the (node id, text) shown on nodes."""
        return asyncio.run(self._run_graph(prompt))

    async def _run_graph(self, prompt: dict[str, Any]) -> list[tuple[str, str]]:
        import aiohttp

        client, texts = "sparge-test", []
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{self.url}/ws?clientId={client}") as websocket,
        ):
            status, answer = self.post("/prompt", {"prompt": prompt, "client_id": client})
            assert status == 200, json.dumps(answer, indent=1)
            while True:
                message = await websocket.receive(timeout=TIMEOUT)
                if message.type == aiohttp.WSMsgType.BINARY:
                    texts.extend(_node_text(message.data))
                elif message.type == aiohttp.WSMsgType.TEXT:
                    event = json.loads(message.data)
                    assert event["type"] != "execution_error", json.dumps(event, indent=1)
                    if event["type"] == "execution_success":
                        return texts

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _node_text(message: bytes) -> Iterator[tuple[str, str]]:
    """ComfyUI's binary message: event type, length of the node id, node id, text."""
    text_event = 3
    if int.from_bytes(message[:4], "big") == text_event:
        end = 8 + int.from_bytes(message[4:8], "big")
        yield message[8:end].decode(), message[end:].decode()


@pytest.fixture(scope="module")
def start_server() -> Iterator[Callable[[Path, dict[str, str]], Server]]:
    """Starts servers that stop when the module's tests are over."""
    servers: list[Server] = []

    def start(base: Path, env: dict[str, str]) -> Server:
        servers.append(Server(base, env))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()

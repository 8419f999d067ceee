# SPDX-License-Identifier: Apache-2.0
"""A real ComfyUI server: starts it, sends it graphs, listens to what its nodes say."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

#: Seconds for the slowest scenario (a cold import of ComfyUI is a third of it).
TIMEOUT = 300


class Server:
    """A process of its own, stopped by `stop`; flags are ComfyUI's. Without a front end it serves
    an empty page."""

    def __init__(
        self, base: Path, env: dict[str, str], flags: Sequence[str], front_end: Path | None = None
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.texts: list[tuple[str, str]] = []
        """Node ids and texts that nodes of the last graph showed."""
        self._log_path = base / "server.log"
        page = front_end or base / "page"
        if front_end is None:
            page.mkdir(exist_ok=True)
            (page / "index.html").write_text("<html></html>")
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "main.py", *flags, "--listen", "127.0.0.1"),
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

        client = "sparge-test"
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{self.url}/ws?clientId={client}") as websocket,
        ):
            self.texts = []
            status, answer = self.post("/prompt", {"prompt": prompt, "client_id": client})
            assert status == 200, json.dumps(answer, indent=1)
            while True:
                message = await websocket.receive(timeout=TIMEOUT)
                if message.type == aiohttp.WSMsgType.BINARY:
                    self.texts.extend(_node_text(message.data))
                elif message.type == aiohttp.WSMsgType.TEXT:
                    event = json.loads(message.data)
                    assert event["type"] != "execution_error", json.dumps(event, indent=1)
                    if event["type"] == "execution_success":
                        return self.texts

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

# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's real frontend in a headless Chromium.

It needs the Python packages playwright and comfyui_frontend_package, and a Chromium: the one in
CHROMIUM, the first of usual names on PATH, or playwright's own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUMS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "chrome",
    "msedge",
)
#: Milliseconds for a page that a slow machine loads.
PATIENCE = 120_000
#: Characters with which a search finds anything.
SEARCHED = 30
SEARCH_OPEN = "() => document.activeElement?.tagName === 'INPUT'"
#: Pixels of the window.
WIDTH, HEIGHT = 1680, 1050


def why_no_browser() -> str:
    """Reason why it cannot run; empty where it can."""
    for module in ("playwright", "comfyui_frontend_package"):
        if importlib.util.find_spec(module) is None:
            return f"needs the Python package {module}"
    if _chromium() is None:
        return "needs a Chromium; name one in CHROMIUM"
    return ""


def _chromium() -> str | None:
    named = [os.environ.get("CHROMIUM"), *map(shutil.which, CHROMIUMS)]
    if found := next(filter(None, named), None):
        return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


def front_end() -> Path:
    spec = importlib.util.find_spec("comfyui_frontend_package")
    assert spec and spec.origin
    return Path(spec.origin).parent / "static"


class Page:
    """A page with the frontend. errors: what scripts threw and did not catch."""

    def __init__(self, page: Any, url: str) -> None:
        self._page, self._opened = page, 0
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(url)
        ready = "() => window.app?.graph && LiteGraph?.registered_node_types?.SpargeAttention"
        page.wait_for_function(ready, timeout=PATIENCE)
        page.wait_for_timeout(2000)
        self._close_dialogs()

    def run(self, script: str, argument: Any = None) -> Any:
        """Result of a function of JavaScript."""
        return self._page.evaluate(script, argument)

    def nodes_2(self, on: bool) -> None:
        """Chooses between the default canvas and Nodes 2.0."""
        self.run("on => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)", on)

    def open(self, graph: dict[str, Any]) -> None:
        """Opens it as the template browser does, under a name of its own: a graph shows what one of
        its name showed before."""
        self._opened += 1
        self.run(
            "([g, name]) => app.loadGraphData(g, true, true, name, {openSource: 'template'})",
            [graph, f"graph {self._opened}"],
        )
        self.settle()
        self._close_dialogs()

    def search(self, word: str, box: str = "default") -> list[str]:
        """Names of the nodes that a search lists. box: which of the boxes the settings choose."""
        self.run("box => app.extensionManager.setting.set('Comfy.NodeSearchBoxImpl', box)", box)
        self.run("() => app.extensionManager.command.execute('Workspace.SearchBox.Toggle')")
        self._page.wait_for_timeout(600)
        self._page.keyboard.type(word)
        self._page.wait_for_timeout(600)
        found = self._page.locator("[role=option]").all_inner_texts()
        self._close_dialogs()
        return [text.splitlines()[0] for text in found if text]

    def place(self, name: str) -> None:
        """Puts a node or blueprint into an empty graph, as a user who searches for its name."""
        self.open({"nodes": [], "links": [], "version": 0.4})
        self.run("() => { app.canvas.ds.scale = 0.8; app.canvas.setDirty(true, true); }")
        middle = WIDTH / 2, HEIGHT / 2
        for _ in range(20):
            self._page.mouse.dblclick(*middle)
            self.settle()
            if self.run(SEARCH_OPEN):
                break
        self._page.keyboard.type(name[:SEARCHED])
        self.settle()
        self.settle()
        self._page.keyboard.press("Enter")
        self.settle()
        self._page.mouse.click(*middle)
        self._page.mouse.move(WIDTH / 2, HEIGHT - 20)  # so that no tooltip hides it
        self.settle()

    def settle(self) -> None:
        """Waits for the nodes to have their sizes."""
        self._page.wait_for_timeout(1200)

    def _close_dialogs(self) -> None:
        self._page.keyboard.press("Escape")
        self._page.wait_for_timeout(300)

    def text(self) -> str:
        """All that the page says outside of the canvas."""
        return self._page.inner_text("body")

    def screenshot(self, path: Path, box: tuple[float, float, float, float] | None = None) -> None:
        """Writes a picture of the page, or of a box of it: left, top, right, bottom."""
        part = None
        if box is not None:
            left, top, right, bottom = box
            part = {"x": left, "y": top, "width": right - left, "height": bottom - top}
        self.run("() => app.canvas.setDirty(true, true)")  # what came since it was last drawn
        self._page.wait_for_timeout(300)
        self._page.screenshot(path=str(path), clip=part)


@contextmanager
def opened(url: str) -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=["--no-sandbox"])
        try:
            yield Page(browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}), url)
        finally:
            browser.close()

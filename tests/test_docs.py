# SPDX-License-Identifier: Apache-2.0
"""What the documentation says is what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparge.kernels.device import SERVED_BY
from sparge.kernels.spec import ARCHS, Element, native_element

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def table_rows(text: str) -> list[list[str]]:
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def section(name: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    assert README.count(begin) == README.count(end) == 1
    return README.split(begin)[1].split(end)[0]


def test_support_table_is_what_the_kernels_serve() -> None:
    said = {row[1]: row[2:] for row in table_rows(section("support"))}
    served = {}
    for (major, minor), targets in SERVED_BY.items():
        arch = ARCHS[targets[0]]
        e4m3 = native_element(arch.name, False, None) is Element.INT8_E4M3
        needs = "{}.{} or newer".format(*arch.needs)
        served[f"{major}.{minor}"] = [arch.name, "E4M3" if e4m3 else "FP16", needs]
    assert said == served


EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=["one call", "library", "compat"])
def test_python_examples_run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_named_targets_and_files_exist(text: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    assert set(re.findall(r"`make (\w+)", text)) <= targets
    for name in re.findall(
        r"`((?:sparge|nodes|csrc|tools|tests|workflows|benchmarks)/[\w./]+)`", text
    ):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / name).exists(), name


def test_the_makefile_explains_each_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE)) - {"help"}
    assert set(re.findall(r'echo "make (\w+)', makefile)) == targets
    assert targets == {"demo", "test", "lint", "kernels", "bench", "clean"}


def test_widget_table_is_the_nodes_widgets() -> None:
    settings = (ROOT / "nodes" / "settings.py").read_text(encoding="utf-8")
    fields = re.findall(r"^    (\w+): \w+ = (.+)$", settings, re.MULTILINE)
    defaults = {name: value.strip('"') for name, value in fields}
    node = (ROOT / "nodes" / "sparge_attention.py").read_text(encoding="utf-8")
    assert "MODE_OF_NEW_NODES = AUTO_QUALITY\n" in node
    api_mode, defaults["mode"] = defaults["mode"], "auto quality"
    table = README.split("| widget | default |")[1].split("\n\n")[0]
    said: dict[str, str] = {}
    for names, values, _ in table_rows("|\n" + table):
        said |= zip(re.findall(r"`(\w+)`", names), values.split(", "), strict=True)
    assert list(said) == list(defaults)
    assert f"without `mode` run as {api_mode}" in table
    for name, value in defaults.items():
        if said[name] != value:
            assert float(said[name]) == float(value), name


def test_perplexities_are_those_of_the_results() -> None:
    lines = (ROOT / "benchmarks" / "results" / "quality.json").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["data"] == "smollm 8192"]
    found = {(row["mode"], row["asked_density"]): row["perplexity"] for row in rows}
    auto = {density: found["ours auto", density] for density in (0.2, 0.3, 1)}
    (dense,) = {row["dense_perplexity"] for row in rows}
    assert (
        f"{auto[0.2]:.2f} with auto budget, {found['ours manual', 0.2]:.2f} with manual, "
        f"{found['drop', 0.2]:.1f} with plain dropping, {dense:.2f} dense. With auto budget it is "
        f"{auto[0.3]:.2f} at 30 %, and {auto[1]:.2f} with all blocks kept"
    ) in " ".join(README.split())


def test_versions_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(\d+\.\d+\.\d+)"$', project, re.MULTILINE)
    assert version
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE)[1] == version[1]  # type: ignore[index]

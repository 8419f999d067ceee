# SPDX-License-Identifier: Apache-2.0
"""What the documentation says is what the code does; its figures are of benchmarks/results."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path

import pytest

import sparge
from benchmarks import report
from sparge.kernels.device import SERVED_BY
from sparge.kernels.spec import ARCHS, Element, native_element
from tests.test_workflows import our_widgets

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in (".", "docs", "docs/hosts", "web/docs", "web/docs/SpargeAttention", "shim")
    for path in sorted((ROOT / folder).glob("*.md"))
}
README, GUIDE = DOCUMENTS["README.md"], DOCUMENTS["docs/guide.md"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^(\w+):", MAKEFILE, re.MULTILINE))


def table_rows(text: str) -> list[list[str]]:
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def section(name: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    assert README.count(begin) == README.count(end) == 1, name
    return README.split(begin)[1].split(end)[0]


#: Formats of attention's values, as the README has them.
VALUES_IN = {
    Element.INT8_INT8: "INT8",
    Element.INT8_E4M3: "E4M3",
    Element.INT8_FP16: "FP16",
    Element.BF16: "16 bits",
}


def test_support_table_is_what_the_kernels_serve() -> None:
    said = {row[1]: row[2:] for row in table_rows(section("support"))}
    served = {}
    for (major, minor), target in SERVED_BY.items():
        arch = ARCHS[target]
        element = native_element(arch.name, False, None)
        needs = "{}.{} or newer".format(*arch.needs)
        served[f"{major}.{minor}"] = [arch.name, VALUES_IN[element], needs]
    assert said == served


#: Every block that is marked as Python is meant to run.
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


EXAMPLES = {
    f"{name}-{index}": code
    for name, text in DOCUMENTS.items()
    for index, code in enumerate(PYTHON.findall(text))
}


@pytest.mark.parametrize("code", EXAMPLES.values(), ids=EXAMPLES)
def test_python_examples_run(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for host in re.findall(r"^from (transformers|diffusers) import", code, re.MULTILINE):
        pytest.importorskip(host, reason=f"needs {host}")
    monkeypatch.chdir(ROOT)
    example = tmp_path / "example.py"
    example.write_text(code, encoding="utf-8")
    runpy.run_path(str(example))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_targets_modules_and_files_exist(name: str) -> None:
    text = DOCUMENTS[name]
    assert set(re.findall(r"`make (\w+)", text)) <= TARGETS
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        linked = (ROOT / name).parent / file if file else ROOT / name
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), target
    if name.startswith("docs/experiments"):
        return  # they name the files of their commits
    for module in re.findall(r"python3? -m ((?:benchmarks|tests|tools|sparge)[.\w]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    folders = "sparge|nodes|csrc|tools|tests|workflows|subgraphs|benchmarks|docs|shim|web"
    for file in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
        assert (ROOT / file).exists(), file
    assert set(re.findall(r"`(test_\w+)`", text)) <= names_of_tests()


@cache
def names_of_tests() -> set[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    return {
        name for file in files for name in re.findall(r"def (test_\w+)", file.read_text("utf-8"))
    }


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_entries_that_code_names_exist() -> None:
    entries = re.findall(r"^#+ (.+)$", DOCUMENTS["docs/experiments.md"], re.MULTILINE)
    folders = ("csrc", "sparge", "nodes", "benchmarks", "tests/oracle")
    paths = [path for name in folders for path in (ROOT / name).rglob("*.*")]
    named = 0
    for path in (path for path in paths if path.suffix in (".py", ".cu", ".cuh")):
        text = re.sub(r"\n\s*(?:#:?|//)?\s*", " ", path.read_text(encoding="utf-8"))
        for _, cited in re.findall(r'docs/experiments\.md(`?), "?(.{,80})', text):
            assert cited.startswith(tuple(entries)), f"{path}: {cited}"
            named += 1
    assert named > 40


def test_the_guide_has_the_defaults_of_api_graphs() -> None:
    """Where they are not those of a new node, which shows its own."""
    mode, start = (our_widgets()[name] for name in ("mode", "start_percent"))
    said = f"without `mode` they run as {mode}, without `start_percent` with {start},"
    assert said in " ".join(GUIDE.split())


def test_versions_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(\d+\.\d+\.\d+)"$', project, re.MULTILINE)
    assert version
    changelog = DOCUMENTS["CHANGELOG.md"]
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE)[1] == version[1]  # type: ignore[index]
    assert sparge.__version__ == version[1]


def test_tables_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["report", "--check"])
    assert report.main() == 0, "run: python -m benchmarks.report"
    pages = "".join(path.read_text(encoding="utf-8") for path in report.PAGES)
    assert all(f"<!-- {name}:begin -->" in pages for name in report.TABLES)


SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for folder in ("benchmarks", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of runpy: the module is imported already
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_asked_for_help_does_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [name, "--help"])
    monkeypatch.setattr(Path, "write_text", lambda path, *_, **__: pytest.fail(f"wrote {path}"))
    with pytest.raises(SystemExit) as left:
        runpy.run_module(name, run_name="__main__")
    assert left.value.code == 0 and "usage:" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_help_pages_are_read_inside_comfyui() -> None:
    """Its panel cuts tables off, and knows no other files of the pack."""
    for name in (name for name in DOCUMENTS if name.startswith("web")):
        assert "\n|" not in DOCUMENTS[name]
        assert re.findall(r"\]\((?!https:)", DOCUMENTS[name]) == []

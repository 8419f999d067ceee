# SPDX-License-Identifier: Apache-2.0
"""The shape of the tree: nodes, tools -> sparge -> sparge.kernels -> csrc, small files, no local
paths."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOSTS = {"transformers"}
LIBRARY_NEEDS = {"torch", "numpy", "ninja"}
TORCH_BRINGS = {"typing_extensions"}  # for the checker of types; Python 3.10 has no Unpack
COMFYUI = {"comfy", "comfy_api", "comfy_execution", "folder_paths", "server", "nodes"}
COMFYUI_BRINGS = {"PIL"}
STAGES = ("quantize", "route", "attend", "score")
LONGEST = 600  # lines; past that a file holds more than one idea
NOT_OURS = re.compile(r"\..+|build|dist|__pycache__|.+\.egg-info")


def files(*suffixes: str, under: Path = ROOT) -> list[Path]:
    return sorted(
        path
        for path in under.rglob("*")
        if path.suffix in suffixes
        and not any(map(NOT_OURS.fullmatch, path.relative_to(ROOT).parts[:-1]))
    )


def imports(path: Path) -> Iterator[str]:
    """What a module imports, relative imports written out from the pack's root."""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
            if node.level:
                assert node.level <= len(package) + 1, f"{path} reaches out of the pack"


@pytest.mark.parametrize(
    ("folder", "allowed", "without"),
    [
        ("sparge", {"sparge"} | LIBRARY_NEEDS | TORCH_BRINGS, "sparge/integrations"),
        ("sparge/integrations", {"sparge"} | LIBRARY_NEEDS | HOSTS, ""),
        ("nodes", {"sparge", "torch"} | COMFYUI | COMFYUI_BRINGS, ""),
    ],
)
def test_a_folder_imports_what_is_below_it(folder: str, allowed: set[str], without: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(".py", under=ROOT / folder)
        if not without or ROOT / without not in path.parents
        for name in imports(path)
        if name.split(".")[0] not in allowed | sys.stdlib_module_names
    ]
    assert found == []


#: Packages and modules of sparge from top to bottom. What stands in one line knows nothing of the
#: others there, and nothing knows `sparge` itself.
ORDER = (
    "integrations",
    "session",
    "compat sdpa",
    "padding attention torch_attention",
    "stages",
    "call reference",
    "head_settings",
    "policy",
    "order stats",
    "checks thresholds",
    "kernels",
    "blocks compiling errors failures reasons weak_cache",
)


def test_the_library_imports_downwards() -> None:
    level = {part: place for place, line in enumerate(ORDER) for part in line.split()}
    found = set()
    for path in files(".py", under=ROOT / "sparge"):
        own = path.relative_to(ROOT / "sparge").with_suffix("").parts[0]
        if own == "__init__":
            continue
        for name in imports(path):
            root, *parts = name.split(".")
            if root != "sparge" or parts[0] == own:
                continue
            if level.get(parts[0], -1) <= level[own]:
                found.add(f"{path.relative_to(ROOT)}: {name.rpartition('.')[0]}")
    assert found == set()


def test_nodes_reach_the_library_by_relative_import_and_nothing_imports_tools() -> None:
    """ComfyUI loads the pack under its folder's name, where an absolute import finds another."""
    absolute = re.compile(r"^\s*(from|import) (sparge|nodes)\b", re.MULTILINE)
    pack = [ROOT / "__init__.py", *files(".py", under=ROOT / "nodes")]
    for path in pack:
        text = path.read_text(encoding="utf-8")
        assert not absolute.search(text) and "integrations" not in text, path
    for path in [*pack, ROOT / "install.py", *files(".py", under=ROOT / "sparge")]:
        assert not any("tools" in name.split(".")[:2] for name in imports(path)), path


def test_a_stage_of_the_kernels_includes_no_other() -> None:
    """Other includes, of a toolkit or of nothing, do not compile (tests/kernels)."""
    csrc = ROOT / "csrc"
    for path in files(".cu", ".cuh", under=csrc):
        own = path.relative_to(csrc).parts[0].removesuffix(".cu").split("_")[0]  # of attend_hopper
        for name in re.findall(r'#\s*include "(\S+)"', path.read_text(encoding="utf-8")):
            stage = (path.parent / name).resolve().relative_to(csrc).parts[0]
            assert stage not in STAGES or stage == own, f"{path} includes {name}"


def test_sources_are_short_and_licensed() -> None:
    for path in files(".py", ".cu", ".cuh", ".js"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= LONGEST, path
        licensed = not lines or lines[0].endswith("SPDX-License-Identifier: Apache-2.0")
        assert licensed, path


def test_nothing_names_a_machine_or_a_registry() -> None:
    folders = "|".join(("work", "tmp", "root", "home", "opt", "Users"))
    local = re.compile(
        rf"(?<![\w.~<>*$)}}-])/(?:{folders})/\w|[A-Z]:\\\\?(?:Users|temp)\\", re.IGNORECASE
    )
    registry = re.compile("|".join((r"py" r"pi\.org", r"python" r"hosted", r"npm" r"js\.org")))
    text_files = files(
        *(".py", ".cu", ".cuh", ".js", ".md", ".toml", ".txt", ".json", ".ini", ".yml", ".jsonl")
    )
    for path in [*text_files, ROOT / "Makefile", ROOT / ".ci" / "run"]:
        text = path.read_text(encoding="utf-8")
        for pattern in (local, registry):
            found = pattern.search(text)
            assert not found, f"{path.relative_to(ROOT)} has {found and found[0]}"

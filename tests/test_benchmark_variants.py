# SPDX-License-Identifier: Apache-2.0
"""Variants of a kernel are compared before they are timed, and nothing compared is no success."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernel_numbers, kernel_variants, sustained
from benchmarks.kernel_variants import BASE, CSRC, Run
from benchmarks.timing import read_rows
from sparge.errors import KernelBuildError
from sparge.kernels import KernelSpec
from sparge.kernels.cubin import Cubin
from sparge.kernels.report import Report
from sparge.kernels.source import read_sources
from sparge.kernels.spec import HOPPER_ATTEND
from sparge.stages import launch

SPEC = KernelSpec(HOPPER_ATTEND, "sm_90a")
CALL = '{"case": "a", "equal": true, "most": 0.0, "repeatable": true}'
OTHER = '{"case": "b", "equal": false, "most": 0.5, "repeatable": true}'
FAR = '{"case": "c", "equal": false, "most": null, "repeatable": false}'

Overlay = Callable[..., str]


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    """overlay(name, text): the folder of a variant that changes the kernel's layout."""

    def make(name: str, text: str = "// another\n") -> str:
        path = tmp_path / name / "attend" / "hopper" / "layout.cuh"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        return str(tmp_path / name)

    return make


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Python that stands for the process which compares a variant; nothing needs a GPU."""
    found: dict[str, str] = {}

    def built(csrc: Path, _: Path) -> dict[KernelSpec, Cubin]:
        if "#error" in (csrc / "attend" / "hopper" / "layout.cuh").read_text():
            raise KernelBuildError("it does not compile", "layout.cuh(1)")
        return {SPEC: Cubin(b"", Report(168, 0, 0, 4, 4))}

    def time(_: Run, names: list[str], rounds: int) -> Iterator[dict[str, Any]]:
        times = {name: [{"attend_ms": 2.0, "stages_ms": 3.0, "call_ms": 4.0}] for name in names}
        for row in kernel_variants.summaries(times):
            yield {"kind": "summary", **row, "shape": "mochi", "case": f"{rounds} rounds"}

    def command(_: Run, name: str) -> list[str]:
        return [sys.executable, "-c", found[name]]

    monkeypatch.setattr(kernel_variants, "built", built)
    monkeypatch.setattr(kernel_variants, "require_hopper", lambda: None)
    monkeypatch.setattr(kernel_variants, "gpu_name", lambda: "some GPU")
    monkeypatch.setattr(Run, "command", command)
    monkeypatch.setattr(Run, "time", time)
    return found


def kinds(path: Path, kind: str) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in read_rows(path) if row["kind"] == kind}


def same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def test_an_overlay_lies_on_a_copy(overlay: Overlay, tmp_path: Path) -> None:
    new = tmp_path / "new" / "ptx" / "sub" / "new.cuh"
    path = Path(overlay("new"))
    new.parent.mkdir(parents=True)
    new.write_text("// new\n")
    before = read_sources(HOPPER_ATTEND)
    csrc = kernel_variants.overlaid(CSRC, path, tmp_path / "csrc")
    changed = {
        file.relative_to(csrc).as_posix()
        for file in csrc.rglob("*")
        if file.is_file() and not same(file, CSRC / file.relative_to(csrc))
    }
    assert changed == {"attend/hopper/layout.cuh", "ptx/sub/new.cuh"}
    assert read_sources(HOPPER_ATTEND, csrc).hash != before.hash
    assert read_sources(HOPPER_ATTEND).hash == before.hash, "the repository is as it was"
    plain = kernel_variants.overlaid(CSRC, None, tmp_path / "plain")
    assert read_sources(HOPPER_ATTEND, plain).hash == before.hash


def test_what_was_compared_is_timed(
    overlay: Overlay, scripts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts["same"] = f"print('a warning'); print('{CALL}')"
    scripts["other"] = f"print('{OTHER}'); print('{CALL}'); print('{FAR}')"
    out = tmp_path / "out.jsonl"
    overlays = [overlay("same"), overlay("other", "// something else\n")]
    assert kernel_variants.main([*overlays, "--rounds", "2", "--out", str(out)]) == 0
    assert list(kinds(out, "summary")) == [BASE, "same", "other"]
    found = kinds(out, "compared")
    assert [(x["calls"], x["equal"]) for x in found.values()] == [(1, 1), (3, 1)]
    assert [row["case"] for row in found["other"]["worst"]] == ["c", "b"]
    assert all(row["gpu"] == "some GPU" for row in read_rows(out))
    said = capsys.readouterr().out
    assert "same: 1 of 1 calls equal bit by bit\n" in said and "b: 0.5" in said
    assert f"base: {SPEC.id} spills 8 bytes" in said and "2 rounds" in said


def test_what_failed_is_not_timed_and_the_status_says_so(
    overlay: Overlay, scripts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_variants, "CHECK_SECONDS", 5)
    scripts["good"] = f"print('{CALL}')"
    scripts["faults"] = f"print('{CALL}'); raise SystemExit('misaligned address')"
    scripts["hangs"] = (
        f"import time; print('{CALL}\\n{OTHER[:9]}', end='', flush=True); time.sleep(99)"
    )
    overlays = [overlay(name) for name in scripts] + [overlay("broken", "#error\n")]
    out = tmp_path / "out.jsonl"
    assert kernel_variants.main([*overlays, "--out", str(out)]) == 1
    assert list(kinds(out, "summary")) == [BASE, "good"]
    why = {name: row["why"] for name, row in kinds(out, "failed").items()}
    assert set(why) == {"broken", "faults", "hangs"}
    assert why["faults"].startswith("exit status 1: misaligned address")
    assert why["hangs"].startswith("it did not end") and "layout.cuh(1)" in why["broken"]
    assert kinds(out, "compared")["hangs"]["calls"] == 1, "what came before is kept"


@pytest.mark.parametrize("script", ["pass", "import no_such_module"])
def test_no_call_compared_is_a_failure(
    overlay: Overlay, scripts: dict[str, str], tmp_path: Path, script: str, capsys: Any
) -> None:
    scripts["variant"] = script
    out = tmp_path / "out.jsonl"
    assert kernel_variants.main([overlay("variant"), "--out", str(out)]) == 1
    assert kinds(out, "summary") == {}
    said = capsys.readouterr().out
    assert "0 of 0 calls" in said and "FAILED, not timed" in said
    assert ("no call was compared" if script == "pass" else "no_such_module") in said


def test_the_base_is_no_variant(
    scripts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An overlay that is laid out otherwise than csrc so does not pass as equal."""
    (tmp_path / "nested" / "csrc").mkdir(parents=True)
    (tmp_path / "nested" / "csrc" / f"{HOPPER_ATTEND}.cu").write_text("// elsewhere\n")
    out = ["--out", str(tmp_path / "out.jsonl")]
    for arguments in ([], [str(tmp_path / "nested")]):
        assert kernel_variants.main([*arguments, *out]) == 1
        assert "it changes nothing" in capsys.readouterr().out


def test_the_repository_is_compared_with_another_base(
    overlay: Overlay, scripts: dict[str, str], tmp_path: Path
) -> None:
    base = kernel_variants.overlaid(CSRC, Path(overlay("old")), tmp_path / "base")
    scripts["repository"] = f"print('{CALL}')"
    out = tmp_path / "out.jsonl"
    assert kernel_variants.main(["--base", str(base), "--out", str(out)]) == 0
    assert list(kinds(out, "summary")) == [BASE, "repository"]


def test_building_needs_no_gpu(
    overlay: Overlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu() -> None:
        raise SystemExit("Nothing to time")

    monkeypatch.setattr(kernel_variants, "require_hopper", no_gpu)
    monkeypatch.setattr(kernel_variants, "built", lambda *_: {SPEC: Cubin(b"", None)})
    out = tmp_path / "out.jsonl"
    assert kernel_variants.main(["--build-only", overlay("one"), "--out", str(out)]) == 0
    assert [(row["kind"], row["variant"]) for row in read_rows(out)] == [
        ("build", BASE),
        ("build", "one"),
    ]


@pytest.mark.parametrize(
    ("benchmark", "arguments", "why"),
    [
        (kernel_variants, ["nowhere"], "nowhere is no folder"),
        (kernel_variants, ["--base", "tests"], "tests is no csrc"),
        (kernel_variants, ["csrc/attend", "csrc/quantize/../attend"], "names of their own"),
        (sustained, ["nowhere"], "nowhere is no folder"),
        (sustained, ["csrc", "--cases", "mars:1"], "'mars:1' is no case: write mochi:1"),
    ],
)
def test_a_command_line_without_sense(
    benchmark: Any,
    arguments: list[str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(CSRC.parent)
    with pytest.raises(SystemExit) as error:
        benchmark.main(arguments)
    assert error.value.code == 2 and why in capsys.readouterr().err


def test_the_comparing_process_finds_the_gpu_suite(tmp_path: Path) -> None:
    """It gets as far as loading the kernels without a GPU, past all imports."""
    run = Run({BASE: tmp_path / "no csrc", "variant": tmp_path}, tmp_path)
    rows, why = run._compare("variant")
    assert rows == [] and "csrc has no attend_hopper.cu" in why


def test_variants_stand_in_for_their_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(spec: KernelSpec, _: int) -> Any:
        return spec.entry

    monkeypatch.setattr(launch, "get_kernel", given)
    variants = object.__new__(kernel_variants.Variants)
    kernel: Any = "the variant's"
    variants._kernels = {"one": {SPEC: kernel}}
    with variants.using("one") as asked:
        assert launch.get_kernel(KernelSpec("route", "sm_90a"), 0) == "route" and not asked
        assert launch.get_kernel(SPEC, 0) == "the variant's" and asked == {SPEC}
    assert launch.get_kernel is given


def test_differences_are_of_bits_and_of_values() -> None:
    def difference(one: list[float], other: list[float]) -> tuple[bool, float]:
        return kernel_numbers.difference((torch.tensor(one),), (torch.tensor(other),))

    assert difference([1.0, -inf, nan], [1.0, -inf, nan]) == (True, 0.0)
    assert difference([0.0, -0.0], [0.0, 0.0]) == (False, 0.0)
    assert difference([1.0, -inf], [1.5, -inf]) == (False, 0.5)
    for bad in (nan, inf, -inf):
        assert difference([1.0, bad], [1.0, 2.0]) == (False, inf)
    assert difference([], []) == (True, 0.0)


def test_gains_are_over_the_base() -> None:
    def times(*ms: float) -> list[dict[str, float]]:
        return [{"attend_ms": x, "stages_ms": x + 1, "call_ms": x + 2} for x in ms]

    found = kernel_variants.summaries({BASE: times(2, 9, 3), "fast": times(2, 2, 1)})
    base, fast = found
    assert (base["attend_ms"], base["attend_gain"], base["call_gain"]) == (3, 0, 0)
    assert (fast["attend_ms"], fast["attend_gain"], fast["call_gain"]) == (2, 0.5, 0.25)

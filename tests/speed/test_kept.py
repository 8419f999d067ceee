# SPDX-License-Identifier: Apache-2.0
"""Speed tables on the disk, on a pretended GPU."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparge import Unsupported
from sparge.speed import TORCH, Backend, Cost, SpeedTable, Times, kept, self_test
from sparge.speed.__main__ import main

COST = Cost(1e-4, 1e-4, 1e-9, 1e-12)
GPU = torch.device("cuda", 0)


def pretend(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    usable = SimpleNamespace(usable=True, arch=arch, reason="")
    monkeypatch.setattr(kept, "capabilities", lambda device: usable)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of the backends that were measured, in order; each table says which one it is."""
    found: list[str] = []

    def measure(device: torch.device, backend: Backend, facts: dict[str, str]) -> SpeedTable:
        found.append(backend.name)
        times = Times(COST, COST, COST, margin=0.03)
        return SpeedTable(facts, f"2026-01-01T00:00:0{len(found)}+00:00", {64: times})

    pretend(monkeypatch, "sm_90a")
    monkeypatch.setattr(kept, "measure_speed", measure)
    monkeypatch.setattr(kept, "check_kernels", lambda device: None)
    monkeypatch.setattr(kept, "driver_version", lambda: 13000)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch, "empty", lambda *_, device: SimpleNamespace(device=device))
    monkeypatch.setattr(kept, "_known", {})
    monkeypatch.setenv("SPARGE_CACHE", str(tmp_path / "cache"))
    return found


@pytest.fixture
def restarted(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], SpeedTable]:
    """restarted(): the table that another process gets."""

    def restarted() -> SpeedTable:
        monkeypatch.setattr(kept, "_known", {})
        table = kept.speed_table(GPU)
        assert table is not None
        return table

    return restarted


@pytest.fixture
def stored(measured: list[str]) -> Path:
    table = kept.speed_table(GPU)
    assert table is not None and measured == [TORCH.name]
    path = kept.path_of(dict(table.facts))
    assert path is not None and path.is_file()
    return path


def test_it_is_measured_once_and_kept_for_one_backend(measured, restarted) -> None:
    assert kept.known_table(GPU) is None
    first = kept.speed_table(GPU)
    assert first is kept.known_table(GPU) is kept.speed_table(GPU)
    assert restarted() == first and measured == [TORCH.name]
    sage = Backend("attention_sage", TORCH.attend)
    assert kept.known_table(GPU, sage) is None
    assert kept.speed_table(GPU, sage) is kept.known_table(GPU, sage)
    assert measured == [TORCH.name, "attention_sage"]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch.cuda, "get_device_name", lambda device: "Another GPU"),
        (kept, "driver_version", lambda: 13010),
        (torch, "__version__", "9.9"),
        (kept, "entry_stem", lambda spec, sources: "another kernel"),
    ],
)
def test_it_is_of_one_gpu_driver_torch_and_kernels(
    stored, measured, restarted, monkeypatch, owner: Any, name: str, value: Any
) -> None:
    monkeypatch.setattr(owner, name, value)
    restarted()
    assert len(measured) == 2


def test_wrong_kernels_are_refused_each_time_and_tested_once(
    measured, untested, monkeypatch
) -> None:
    tested = []

    def largest_error(head_dim: int, device: torch.device) -> float:
        tested.append(device)
        return math.nan

    monkeypatch.setattr(self_test, "largest_error", largest_error)
    monkeypatch.setattr(kept, "check_kernels", self_test.check_kernels)
    for backend in (TORCH, TORCH, Backend("attention_sage", TORCH.attend)):
        with pytest.raises(self_test.WrongKernels, match="error nan at head_dim 64"):
            kept.speed_table(GPU, backend)
    assert tested == [GPU] and not measured and not kept.kept_tables()


def test_a_kept_table_is_of_kernels_that_passed(stored, restarted, monkeypatch) -> None:
    def refuse(device: torch.device) -> None:
        raise AssertionError("tested again")

    monkeypatch.setattr(kept, "check_kernels", refuse)
    assert restarted().facts["gpu"] == "Some GPU"


def test_a_table_of_an_older_format_is_measured_anew(
    stored, measured, restarted, monkeypatch, caplog, capsys
) -> None:
    monkeypatch.setattr(kept, "_FORMAT", "newer")
    assert not kept.kept_tables()
    restarted()
    assert len(measured) == 2 and len(kept.kept_tables()) == 1 and not caplog.messages


def of_another_gpu(path: Path) -> None:
    path.write_text(path.read_text().replace("Some GPU", "Another GPU"))


posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no such modes")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        *((lambda path, content=content: path.write_bytes(content), "is not used")
          for content in (b"", b"{", b"[" * 10**5, b"{}", b'{"head_dims": 3}', b"\xff")),
        (of_another_gpu, ""),
        pytest.param(lambda path: path.chmod(0o777), "other users may write", marks=posix),
        pytest.param(lambda path: path.parent.chmod(0o777), "other users may write", marks=posix),
    ],
)  # fmt: skip
def test_a_file_that_is_not_believed(stored, measured, restarted, caplog, spoil, said: str) -> None:
    spoil(stored)
    assert restarted().facts["gpu"] == "Some GPU" and len(measured) == 2 and said in caplog.text
    if said == "is not used":
        assert json.loads(stored.read_bytes())["facts"]["gpu"] == "Some GPU"


def test_a_folder_that_cannot_be_written_is_said(measured, monkeypatch, caplog) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(kept, "write_whole", refuse)
    assert kept.speed_table(GPU) is kept.speed_table(GPU) is not None
    assert caplog.text.count("measured again at the next start") == 1
    assert "read-only" in caplog.text and "SPARGE_CACHE" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), Unsupported("no")])
def test_without_room_to_measure_there_is_none(measured, monkeypatch, caplog, error) -> None:
    def fail(*_: object) -> None:
        raise error

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kept, "measure_speed", fail)
    assert kept.speed_table(GPU) is None and "was not measured" in caplog.text


@pytest.mark.parametrize(
    ("margins", "is_kept"), [((0.2, 0.1), True), ((0.2, 0.2), False)], ids=["once", "twice"]
)
@pytest.mark.parametrize("quiet", [(), (128,)], ids=["all heads", "heads of one width"])
def test_a_busy_gpu_is_measured_once_more_and_not_kept(
    measured, monkeypatch, quiet: tuple[int, ...], margins: Any, is_kept: bool
) -> None:
    measure, left = kept.measure_speed, list(margins)

    def busy(*given: Any) -> SpeedTable:
        disturbed, still = (Times(COST, COST, COST, margin) for margin in (left.pop(0), 0.03))
        by_head_dim = {64: disturbed} | dict.fromkeys(quiet, still)
        return replace(measure(*given), by_head_dim=by_head_dim)

    monkeypatch.setattr(kept, "measure_speed", busy)
    table = kept.speed_table(GPU)
    assert len(measured) == 2 and table is kept.known_table(GPU) is not None
    assert bool(kept.kept_tables()) == is_kept


def test_the_command_shows_what_is_kept_and_forgets_it(stored, measured, capsys) -> None:
    stored.with_name("speed.0123456789abcdef.json").write_text("{}")
    main([])
    told = capsys.readouterr().out
    assert "Some GPU" in told and str(stored) in told and "8-bit dense" in told
    main(["--anew"])
    assert not stored.exists() and "the next run measures anew" in capsys.readouterr().out
    assert len(measured) == 1


def test_a_cpu_has_none() -> None:
    assert kept.speed_table("cpu") is kept.known_table(torch.device("cpu")) is None

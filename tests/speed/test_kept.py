# SPDX-License-Identifier: Apache-2.0
"""Speed tables on the disk, on a pretended GPU."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparge import Unsupported
from sparge.speed import TORCH, Backend, Cost, SpeedTable, Times, kept
from sparge.speed.__main__ import main

COST = Cost(1e-4, 1e-4, 1e-9, 1e-12)
GPU = torch.device("cuda", 0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of the backends that were measured, in order; each table says which one it is."""
    found: list[str] = []

    def measure(device: torch.device, backend: Backend, facts: dict[str, str]) -> SpeedTable:
        found.append(backend.name)
        times = Times(COST, COST, COST, margin=0.03)
        return SpeedTable(facts, f"2026-01-01T00:00:0{len(found)}+00:00", {64: times})

    usable = SimpleNamespace(usable=True, arch="sm_90a", reason="")
    monkeypatch.setattr(kept, "measure_speed", measure)
    monkeypatch.setattr(kept, "capabilities", lambda device: usable)
    monkeypatch.setattr(kept, "driver_version", lambda: 13000)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch, "empty", lambda *_, device: SimpleNamespace(device=device))
    monkeypatch.setattr(kept, "_known", {})
    monkeypatch.setenv("SPARGE_CACHE", str(tmp_path / "cache"))
    return found


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_known", {})


def stored(measured: list[str]) -> Path:
    table = kept.speed_table(GPU)
    assert table is not None and measured == [TORCH.name]
    path = kept.path_of(dict(table.facts))
    assert path is not None and path.is_file()
    return path


def test_it_is_measured_once_and_kept(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept.known_table(GPU) is None
    stored(measured)
    first = kept.speed_table(GPU)
    assert first is kept.known_table(GPU) is kept.speed_table(GPU)
    restart(monkeypatch)
    assert kept.speed_table(GPU) == first and len(measured) == 1, "another process"


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
    measured: list[str], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any
) -> None:
    stored(measured)
    monkeypatch.setattr(owner, name, value)
    restart(monkeypatch)
    kept.speed_table(GPU)
    assert len(measured) == 2


def test_it_is_of_one_backend(measured: list[str]) -> None:
    stored(measured)
    sage = Backend("attention_sage", TORCH.attend)
    assert kept.known_table(GPU, sage) is None
    assert kept.speed_table(GPU, sage) is kept.known_table(GPU, sage)
    assert measured == [TORCH.name, "attention_sage"]


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 10**5, b"{}", b'{"head_dims": 3}', b"\xff"])
def test_a_damaged_file_is_measured_anew(
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: bytes,
) -> None:
    path = stored(measured)
    path.write_bytes(content)
    restart(monkeypatch)
    kept.speed_table(GPU)
    assert len(measured) == 2 and "damaged" in caplog.text
    assert json.loads(path.read_bytes())["facts"]["gpu"] == "Some GPU"


def test_a_table_of_other_facts_under_this_name_is_not_believed(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(measured)
    content = json.loads(path.read_bytes())
    content["facts"]["gpu"] = "Another GPU"
    path.write_text(json.dumps(content))
    restart(monkeypatch)
    table = kept.speed_table(GPU)
    assert table is not None and table.facts["gpu"] == "Some GPU" and len(measured) == 2


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no such modes")
@pytest.mark.parametrize("open_to_others", ["file", "folder"])
def test_what_others_may_write_is_not_believed(
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    open_to_others: str,
) -> None:
    path = stored(measured)
    (path if open_to_others == "file" else path.parent).chmod(0o777)
    restart(monkeypatch)
    kept.speed_table(GPU)
    assert len(measured) == 2 and "other users may write" in caplog.text


def test_a_folder_that_cannot_be_written_is_said(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(kept, "write_whole", refuse)
    assert kept.speed_table(GPU) is kept.speed_table(GPU) is not None
    assert caplog.text.count("measured again at the next start") == 1
    assert "read-only" in caplog.text and "SPARGE_CACHE" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), Unsupported("no")])
def test_without_room_to_measure_there_is_none(
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def fail(*_: object) -> None:
        raise error

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kept, "measure_speed", fail)
    assert kept.speed_table(GPU) is None and "was not measured" in caplog.text


@pytest.mark.parametrize(("margins", "is_kept"), [((0.2, 0.1), True), ((0.2, 0.2), False)])
def test_a_busy_gpu_is_measured_once_more_and_not_kept(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, margins: Any, is_kept: bool
) -> None:
    measure, left = kept.measure_speed, list(margins)

    def busy(*given: Any) -> SpeedTable:
        times = Times(COST, COST, COST, margin=left.pop(0))
        return replace(measure(*given), by_head_dim={64: times})

    monkeypatch.setattr(kept, "measure_speed", busy)
    table = kept.speed_table(GPU)
    assert len(measured) == 2 and table is kept.known_table(GPU) is not None
    assert bool(kept.kept_tables()) == is_kept


def test_the_command_shows_what_is_kept_and_forgets_it(
    measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored(measured)
    path.with_name("speed.0123456789abcdef.json").write_text("{}")
    main([])
    told = capsys.readouterr().out
    assert "Some GPU" in told and str(path) in told and "8-bit dense" in told
    main(["--anew"])
    assert not path.exists() and "the next run measures anew" in capsys.readouterr().out
    assert len(measured) == 1


def test_a_cpu_has_none() -> None:
    assert kept.speed_table("cpu") is kept.known_table(torch.device("cpu")) is None

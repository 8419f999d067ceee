# SPDX-License-Identifier: Apache-2.0
"""Speed tables on the disk, on a pretended GPU."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparge import Unsupported
from sparge.kernels import Element, chosen
from sparge.kernels.chosen import Place
from sparge.speed import TORCH, Backend, Cost, SpeedTable, Times, kept, variants
from sparge.speed.__main__ import main
from sparge.speed.table import Chosen

COST = Cost(1e-4, 1e-4, 1e-9, 1e-12)
GPU = torch.device("cuda", 0)


def pretend(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    usable = SimpleNamespace(usable=True, arch=arch, reason="")
    for module in (kept, variants):
        monkeypatch.setattr(module, "capabilities", lambda device: usable)


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


class TestVariants:
    """Of an RTX card, whose target has several."""

    CHOSEN = Chosen({64: Element.INT8_E4M3, 128: Element.INT8_INT8}, {64: (), 128: (Element.BF16,)})

    @pytest.fixture
    def raced(self, measured, monkeypatch) -> list[tuple[Element, ...]]:
        """Candidates that were timed, each time."""
        found: list[tuple[Element, ...]] = []

        def choose_fastest(device: torch.device, candidates: tuple[Element, ...]) -> Chosen:
            found.append(candidates)
            return self.CHOSEN

        pretend(monkeypatch, "sm_120a")
        monkeypatch.setattr(chosen, "_choices", chosen.Choices())
        monkeypatch.setattr(kept, "choose_fastest", choose_fastest)
        monkeypatch.setattr(variants, "warm_variants", lambda device: {})
        return found

    @staticmethod
    def used(head_dim: int, gpu: int = 0) -> Element:
        return chosen._choices.use(Place(gpu, "sm_120a", head_dim))

    def test_they_are_frozen_in_the_file(self, raced, restarted, monkeypatch) -> None:
        table = restarted()
        assert table.chosen == self.CHOSEN
        for _ in range(2):
            assert (self.used(64), self.used(128)) == (Element.INT8_E4M3, Element.INT8_INT8)
            monkeypatch.setattr(chosen, "_choices", chosen.Choices())
            assert restarted() == table and len(raced) == 1
        assert raced == [(Element.INT8_INT8, Element.INT8_E4M3, Element.BF16)]

    @pytest.mark.parametrize("asked", [kept.speed_table, kept.known_table])
    def test_calls_of_a_second_gpu_of_that_name_use_them_too(self, raced, measured, asked) -> None:
        """In a run that ComfyUI splits over GPUs, the second is asked for what is known alone."""
        assert kept.speed_table(GPU) is asked(torch.device("cuda", 1))
        assert (self.used(64, gpu=1), self.used(128, gpu=1)) == (self.used(64), self.used(128))
        assert self.used(64) is Element.INT8_E4M3 and len(raced) == len(measured) == 1

    def test_that_a_call_came_before_is_told_once(self, raced, caplog) -> None:
        self.used(64)
        caplog.set_level(logging.INFO)
        assert kept.speed_table(GPU) is kept.speed_table(GPU) is kept.known_table(GPU)
        assert caplog.text.count("comes with the next start") == 1

    def test_what_is_measured_is_measured_with_them(self, raced, measured, monkeypatch) -> None:
        measure, seen = kept.measure_speed, []

        def looking(*given: Any) -> SpeedTable:
            seen.append(self.used(64))
            return measure(*given)

        monkeypatch.setattr(kept, "measure_speed", looking)
        kept.speed_table(GPU)
        assert seen == [Element.INT8_E4M3]

    @pytest.mark.parametrize("restart", [False, True])
    def test_another_backend_has_the_same(self, raced, restarted, monkeypatch, restart) -> None:
        restarted()
        if restart:
            monkeypatch.setattr(kept, "_known", {})
        table = kept.speed_table(GPU, Backend("attention_sage", TORCH.attend))
        assert table is not None and table.chosen == self.CHOSEN and len(raced) == 1

    @pytest.mark.parametrize("name", ["INT4_INT4", "INT8_FP16", 3])
    def test_a_file_with_an_unknown_one_is_refused(
        self, raced, measured, restarted, caplog, name: Any
    ) -> None:
        """Or with one that another target has."""
        path = kept.path_of(dict(restarted().facts))
        assert path is not None
        stored = json.loads(path.read_bytes())
        stored["elements"]["64"] = name
        path.write_text(json.dumps(stored))
        assert restarted().chosen == self.CHOSEN and len(raced) == len(measured) == 2
        assert "damaged" in caplog.text
        assert json.loads(path.read_bytes())["elements"]["64"] == "INT8_E4M3"

    def test_without_a_table_they_are_the_targets_own(self, raced, monkeypatch) -> None:
        def fail(*_: object) -> None:
            raise torch.OutOfMemoryError("full")

        monkeypatch.setattr(kept, "measure_speed", fail)
        assert kept.speed_table(GPU) is None and len(raced) == 1
        assert self.used(64) is self.used(128) is Element.INT8_INT8

    def test_the_command_says_which_and_what_was_wrong(self, raced, restarted, capsys) -> None:
        restarted()
        main([])
        told = capsys.readouterr().out
        assert "head_dim 64: values as INT8_E4M3" in told
        assert "head_dim 128: values as INT8_INT8; not used, for it computes wrong" in told


def test_a_table_of_an_older_format_is_measured_anew(
    stored, measured, restarted, monkeypatch, caplog, capsys
) -> None:
    monkeypatch.setattr(kept, "_FORMAT", "3")
    assert not kept.kept_tables()
    restarted()
    assert len(measured) == 2 and len(kept.kept_tables()) == 1 and not caplog.messages


def of_another_gpu(path: Path) -> None:
    path.write_text(path.read_text().replace("Some GPU", "Another GPU"))


posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no such modes")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        *((lambda path, content=content: path.write_bytes(content), "damaged")
          for content in (b"", b"{", b"[" * 10**5, b"{}", b'{"head_dims": 3}', b"\xff")),
        (of_another_gpu, ""),
        pytest.param(lambda path: path.chmod(0o777), "other users may write", marks=posix),
        pytest.param(lambda path: path.parent.chmod(0o777), "other users may write", marks=posix),
    ],
)  # fmt: skip
def test_a_file_that_is_not_believed(stored, measured, restarted, caplog, spoil, said: str) -> None:
    spoil(stored)
    assert restarted().facts["gpu"] == "Some GPU" and len(measured) == 2 and said in caplog.text
    if said == "damaged":
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


@pytest.mark.parametrize(("margins", "is_kept"), [((0.2, 0.1), True), ((0.2, 0.2), False)])
def test_a_busy_gpu_is_measured_once_more_and_not_kept(
    measured, monkeypatch, margins: Any, is_kept: bool
) -> None:
    measure, left = kept.measure_speed, list(margins)

    def busy(*given: Any) -> SpeedTable:
        times = Times(COST, COST, COST, margin=left.pop(0))
        return replace(measure(*given), by_head_dim={64: times})

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
